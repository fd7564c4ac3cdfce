//! A random killer among all the processes of the payments system: both relays, Postgres, the broker,
//! shops and consumers. Whatever it does, in the end each committed payment has exactly one effect
//! of each kind, in the order of its account, and the ledger balances.
//!
//! `make chaos` runs the long form. `CHAOS_SEED` and `CHAOS_KILLS` choose another one.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::kafka::Broker;
use crate::payments::{Actor, Balance, Role, System, judge};
use crate::postgres::{Cluster, Pg};
use crate::proc::eventually;
use crate::relay::Relay;
use crate::stage::MINUTE;

/// Between two looks at who has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const SHOPS: i64 = 2;
/// Connections of a shop.
const TILLS: i64 = 4;
const LEDGERS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Leader,
    Standby,
    Postgres,
    Broker,
    Shop,
    Ledger,
    Payout,
}

/// How often each is killed, of fifteen.
const SHARES: [(Victim, usize); 7] = [
    (Victim::Leader, 4),
    (Victim::Standby, 1),
    (Victim::Postgres, 2),
    (Victim::Broker, 1),
    (Victim::Shop, 2),
    (Victim::Ledger, 3),
    (Victim::Payout, 2),
];

struct Plan {
    seed: u64,
    kills: usize,
    a_second: u32,
    /// The longest pause between two kills; half of it on average.
    pause: Duration,
}

#[test]
fn a_dozen_random_kills_leave_each_payment_one_effect() {
    survive(&Plan {
        seed: seed(),
        kills: 15,
        a_second: 300,
        pause: Duration::from_millis(1200),
    });
}

#[test]
#[ignore = "minutes: make chaos"]
fn chaos_of_two_hundred_kills_at_500_payments_a_second_leaves_each_payment_one_effect() {
    let kills = std::env::var("CHAOS_KILLS").ok();
    survive(&Plan {
        seed: seed(),
        kills: kills.map_or(200, |n| n.parse().expect("CHAOS_KILLS is a number")),
        a_second: 500,
        pause: Duration::from_millis(2500),
    });
}

fn seed() -> u64 {
    if let Ok(seed) = std::env::var("CHAOS_SEED") {
        return seed.parse().expect("CHAOS_SEED is a number");
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::from(now.expect("after 1970").subsec_nanos())
}

/// SplitMix64: small, and the same everywhere.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end).expect("fits");
        usize::try_from(self.next() % end).expect("below the end")
    }

    fn up_to(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.below(1000) as f64 / 1000.0)
    }
}

/// Who is killed, in which order: every share is there, shuffled.
fn victims(kills: usize, chance: &mut Chance) -> Vec<Victim> {
    let round: Vec<Victim> = SHARES
        .iter()
        .flat_map(|(victim, share)| std::iter::repeat_n(*victim, *share))
        .collect();
    let mut all: Vec<Victim> = round.iter().copied().cycle().take(kills).collect();
    for at in (1..all.len()).rev() {
        all.swap(at, chance.below(at + 1));
    }
    all
}

/// The processes that run now, and those who start them again.
struct Cast<'a> {
    system: &'a System<'a>,
    relays: [Relay; 2],
    shops: Vec<Actor>,
    ledgers: Vec<Actor>,
    payout: Actor,
    a_second: u32,
    restarts: usize,
}

impl<'a> Cast<'a> {
    fn new(system: &'a System<'a>, a_second: u32) -> Cast<'a> {
        let relays = [system.relay(&[]), system.relay(&[])];
        let mut cast = Cast {
            system,
            relays,
            shops: Vec::new(),
            ledgers: (0..LEDGERS)
                .map(|n| system.start(system.consumer("ledger", n), None))
                .collect(),
            payout: system.start(system.consumer("payout", 0), None),
            a_second,
            restarts: 0,
        };
        cast.shops = (0..SHOPS).map(|number| cast.shop(number)).collect();
        cast
    }

    fn shop(&self, number: i64) -> Actor {
        let role = Role::Shop {
            tills: (1..=TILLS).map(|till| number * TILLS + till).collect(),
            a_second: self.a_second / u32::try_from(SHOPS).expect("a few"),
        };
        self.system.start(role, None)
    }

    /// What a supervisor does: who has ended is started again. A relay ends only when it is killed.
    fn supervise(&mut self) {
        for number in 0..self.shops.len() {
            if self.shops[number].is_due() {
                self.shops[number] = self.shop(i64::try_from(number).expect("a few"));
                self.restarts += 1;
            }
        }
        for n in 0..self.ledgers.len() {
            if self.ledgers[n].is_due() {
                let role = self.system.consumer("ledger", n);
                self.ledgers[n] = self.system.start(role, None);
                self.restarts += 1;
            }
        }
        if self.payout.is_due() {
            self.payout = self.system.start(self.system.consumer("payout", 0), None);
            self.restarts += 1;
        }
        for relay in &mut self.relays {
            relay.assert_alive();
        }
    }

    /// The place of the relay that said last that it leads; the first where nobody did.
    fn leader(&self) -> usize {
        let leads = |relay: &Relay| {
            let lines = relay.lines();
            let mut said = lines.iter().rev().filter_map(|line| {
                let leads = line.has("leading: the lock is ours");
                let stands_by = line.has("standing by") || line.has("no longer leading");
                (leads || stands_by).then_some(leads)
            });
            said.next().unwrap_or(false)
        };
        usize::from(!leads(&self.relays[0]) && leads(&self.relays[1]))
    }

    fn kill_relay(&mut self, place: usize) {
        self.relays[place].kill9();
        self.relays[place] = self.system.relay(&[]);
    }

    fn kill(&mut self, victim: Victim, chance: &mut Chance) {
        match victim {
            Victim::Leader => self.kill_relay(self.leader()),
            Victim::Standby => self.kill_relay(1 - self.leader()),
            Victim::Shop => {
                let at = chance.below(self.shops.len());
                self.shops[at].kill9();
            }
            Victim::Ledger => {
                let at = chance.below(self.ledgers.len());
                self.ledgers[at].kill9();
            }
            Victim::Payout => self.payout.kill9(),
            Victim::Postgres => self.system.source.cluster.kill9(),
            Victim::Broker => self.system.broker.kill9(),
        }
    }
}

fn survive(plan: &Plan) {
    let cluster = Cluster::start(Pg::V18);
    let broker = Broker::start();
    let system = System::new(&cluster, &broker, broker.bootstrap());
    let mut cast = Cast::new(&system, plan.a_second);
    // Either of them.
    eventually(MINUTE, "a relay streams", || {
        let streams = |relay: &Relay| relay.lines().iter().any(|l| l.has("streaming from"));
        cast.relays.iter().any(streams).then_some(())
    });

    say(&format!(
        "chaos: CHAOS_SEED={} CHAOS_KILLS={}",
        plan.seed, plan.kills
    ));
    let mut chance = Chance(plan.seed);
    let victims = victims(plan.kills, &mut chance);
    let mut kills: BTreeMap<Victim, usize> = BTreeMap::new();
    let began = Instant::now();
    thread::scope(|scope| {
        let mut starting: BTreeMap<Victim, ScopedJoinHandle<'_, ()>> = BTreeMap::new();
        for victim in victims {
            let until = Instant::now() + chance.up_to(plan.pause);
            // Only what runs can be killed.
            let starts = |server: &ScopedJoinHandle<'_, ()>| !server.is_finished();
            while Instant::now() < until || starting.get(&victim).is_some_and(starts) {
                cast.supervise();
                thread::sleep(LOOK_EVERY);
            }
            if let Some(server) = starting.remove(&victim) {
                server.join().expect("it starts again");
            }
            cast.kill(victim, &mut chance);
            *kills.entry(victim).or_default() += 1;
            if matches!(victim, Victim::Postgres | Victim::Broker) {
                let outage = chance.up_to(Duration::from_secs(1));
                let (cluster, broker) = (&cluster, &broker);
                let server = scope.spawn(move || {
                    // The outage is the fault.
                    thread::sleep(outage);
                    if victim == Victim::Postgres {
                        cluster.up();
                    } else {
                        broker.up();
                    }
                });
                starting.insert(victim, server);
            }
        }
    });
    let chaos = began.elapsed();
    cast.shops.clear();
    settle(&mut cast);
    let balance = judge(&system);
    report(plan, &kills, &cast, &balance, chaos);
    assert!(balance.complaints.is_empty(), "{:?}", balance.complaints);
    assert!(balance.payments > plan.kills * 20, "hardly anybody paid");
    for relay in &mut cast.relays {
        relay.stop();
    }
}

/// Everything that is committed is relayed and consumed.
fn settle(cast: &mut Cast<'_>) {
    let system = cast.system;
    // Whoever died of the last outage is needed.
    cast.supervise();
    system.wait_confirmed(5 * MINUTE);
    let until = Instant::now() + 5 * MINUTE;
    let (ledger, payout) = (system.ends("ledger"), system.ends("payout"));
    while !(ledger.is_reached() && payout.is_reached()) {
        assert!(
            Instant::now() < until,
            "the ledger is at {ledger}, the payouts at {payout}"
        );
        cast.supervise();
        thread::sleep(LOOK_EVERY);
    }
}

fn report(
    plan: &Plan,
    kills: &BTreeMap<Victim, usize>,
    cast: &Cast<'_>,
    balance: &Balance,
    chaos: Duration,
) {
    let killed: Vec<String> = kills
        .iter()
        .map(|(victim, n)| format!("{n} {victim:?}").to_lowercase())
        .collect();
    let verdict = &balance.in_topic;
    let balances = if balance.complaints.is_empty() {
        "each payment has one effect of each kind, in order; the ledger balances".to_owned()
    } else {
        format!("FAILED: {}", balance.complaints.join("; "))
    };
    say(&format!(
        "chaos, seed {}: {} kills -9 in {:.0} s: {}\n\
         \x20 payments committed  {:>9}   {:.0} a second\n\
         \x20 cents               {:>9}\n\
         \x20 records             {:>9}   {} of them repeats, {} lost, {} keys out of order\n\
         \x20 processes restarted {:>9}   by their supervisor, those among them that lost their database\n\
         \x20 {balances}",
        plan.seed,
        plan.kills,
        chaos.as_secs_f64(),
        killed.join(", "),
        balance.payments,
        balance.payments as f64 / chaos.as_secs_f64(),
        balance.cents,
        verdict.records,
        verdict.duplicates,
        verdict.lost.len(),
        verdict.reordered.len(),
        cast.restarts,
    ));
}

/// Past the harness, which shows what is printed for failed tests only.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
