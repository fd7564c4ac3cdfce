# make help says what there is.
.DEFAULT_GOAL := help
.PHONY: help deps servers test chaos soak mutants demo bench lint release

CARGO ?= cargo
DEMO_ARGS ?=
BENCH_ARGS ?=
# Servers, writers and relays of a live test want a core or two each.
TEST_THREADS ?= 2

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

deps: ## install what building and testing need (as root), or name it
	@tests/servers/install.sh build servers

servers: ## fetch the real Postgres and Kafka that the tests run against
	@tests/servers/install.sh servers
	@tests/servers/fetch.sh

test: deps ## everything: unit, tidy, simulation, live tests on real servers
	@tests/servers/fetch.sh
	SIM_BUDGET_SECS=$${SIM_BUDGET_SECS:-60} \
		$(CARGO) test --release --features faults --lib --bins --test tidy --test sim
	$(CARGO) test --release --features faults --test live -- --test-threads=$(TEST_THREADS)

chaos: deps ## 200 random kills of everything at 500 payments a second (CHAOS_SEED, CHAOS_KILLS)
	@tests/servers/fetch.sh
	$(CARGO) test --release --features faults --test live -- --ignored --exact \
		chaos::chaos_of_two_hundred_kills_at_500_payments_a_second_leaves_each_payment_one_effect

soak: deps ## what takes long: a million simulated crashes (SIM_CRASHES), outages in real time, mutants
	@tests/servers/fetch.sh
	SIM_CRASHES=$${SIM_CRASHES:-1000000} $(CARGO) test --release --features faults --test sim -- --nocapture
	$(CARGO) test --release --features faults --test live -- --ignored --test-threads=1 soak_

	@command -v cargo-mutants >/dev/null 2>&1 || $(CARGO) install cargo-mutants --locked
	tests/mutants/every.sh

mutants: ## deliberate breakages, and which test sees each of them
	@tests/mutants/run.sh

demo: ## rows become Kafka records before your eyes (DEMO_ARGS="--seconds 8")
	@tests/servers/install.sh build
	@$(CARGO) build --release --bin walrelay
	@tests/servers/demo.sh $(DEMO_ARGS)

bench: ## the table of numbers, measured here (BENCH_ARGS)
	@tests/servers/install.sh build servers bench
	@tests/servers/fetch.sh
	$(CARGO) bench --bench end_to_end -- $(BENCH_ARGS)

lint: ## rustfmt and clippy, warnings are errors
	@tests/servers/install.sh build
	$(CARGO) fmt --check
	$(CARGO) clippy --release --features faults --all-targets -- -D warnings

release: ## a self-contained binary, OpenSSL inside
	@tests/servers/install.sh vendored
	$(CARGO) build --release --features vendored --bin walrelay
