//! The six kills, for real: `kill -9` at each point between a customer's payment and its effects,
//! with what database, broker and consumers hold before and after. The table is printed, and every
//! difference from what is expected fails.

pub mod proxy;

use std::fmt;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use crate::kafka::Rec;
use crate::payments::{Actor, Offsets, Payment, Point, Role, System, judge};
use crate::postgres::{Cluster, Pg, Sql};
use crate::proc::{eventually, eventually_says};
use crate::relay::Relay;
use crate::stage::MINUTE;
use proxy::{Proxy, Way, broker_behind_a_proxy};

/// Records beyond the first after a crash of the relay between a delivery and its confirmation: the
/// topic's tail is read, which has the event.
const REPEATS_AFTER_A_CRASH: usize = 0;

/// What is there of one payment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Holds {
    /// Rows.
    payment: usize,
    outbox: usize,
    /// Is the slot's confirmed position past it?
    slot: bool,
    /// Records in the topic.
    records: usize,
    /// Effects.
    ledger: usize,
    payout: usize,
    /// Is the ledger's committed offset past all of its records?
    offset: bool,
}

impl fmt::Display for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let past = |is_past| if is_past { "past" } else { "-" };
        write!(
            f,
            "{:>7} {:>6} {:>4} {:>7} {:>6} {:>6} {:>6}",
            self.payment,
            self.outbox,
            past(self.slot),
            self.records,
            self.ledger,
            self.payout,
            past(self.offset),
        )
    }
}

/// Nothing of it is there.
const NOTHING: Holds = Holds {
    payment: 0,
    outbox: 0,
    slot: false,
    records: 0,
    ledger: 0,
    payout: 0,
    offset: false,
};
/// Everything, once.
const WHOLE: Holds = Holds {
    payment: 1,
    outbox: 1,
    slot: true,
    records: 1,
    ledger: 1,
    payout: 1,
    offset: true,
};
const COMMITTED: Holds = Holds {
    payment: 1,
    outbox: 1,
    ..NOTHING
};
/// It arrived and had its effects, and the slot does not know.
const UNCONFIRMED: Holds = Holds {
    slot: false,
    ..WHOLE
};
const REPEATED: Holds = Holds {
    records: 1 + REPEATS_AFTER_A_CRASH,
    ..WHOLE
};

struct Kill {
    name: &'static str,
    /// Who makes it whole again, without a person.
    healed_by: &'static str,
    before: Holds,
    after: Holds,
}

const KILLS: [Kill; 8] = [
    Kill {
        name: "1  writer, before its commit",
        healed_by: "the customer's second try",
        before: NOTHING,
        after: WHOLE,
    },
    Kill {
        name: "2  writer, after its commit, relay down",
        healed_by: "the relay's start",
        before: COMMITTED,
        after: WHOLE,
    },
    Kill {
        name: "3a relay, broker has the record, ack lost",
        healed_by: "the relay's restart",
        before: UNCONFIRMED,
        after: REPEATED,
    },
    Kill {
        name: "3b relay, the record never arrived",
        healed_by: "the relay's restart",
        before: COMMITTED,
        after: WHOLE,
    },
    Kill {
        name: "4  relay, after the ack, slot not confirmed",
        healed_by: "the relay's restart",
        before: UNCONFIRMED,
        after: REPEATED,
    },
    Kill {
        name: "5  ledger, mid-effect",
        healed_by: "the ledger's restart",
        before: Holds {
            ledger: 0,
            offset: false,
            ..WHOLE
        },
        after: WHOLE,
    },
    Kill {
        name: "6  ledger, effect committed, offset not",
        healed_by: "the ledger's restart",
        before: Holds {
            offset: false,
            ..WHOLE
        },
        after: WHOLE,
    },
    Kill {
        name: "X  a wrong ledger: claim committed first",
        healed_by: "nobody: the effect is LOST",
        before: Holds {
            ledger: 0,
            offset: false,
            ..WHOLE
        },
        after: Holds { ledger: 0, ..WHOLE },
    },
];

/// What was seen of one kill.
struct Seen {
    before: Holds,
    after: Holds,
    took: Duration,
}

/// Kills somebody: what there was before the heal, and when it was.
type Scene<'a> = fn(&mut Theatre<'a>, &Holds) -> (Holds, Instant);

struct Theatre<'a> {
    system: System<'a>,
    proxy: &'a Proxy,
    relay: Relay,
    ledger: Actor,
    /// Never killed here.
    _payout: Actor,
    /// Who counts as the ledger: the wrong one in the last scene.
    ledger_name: &'static str,
    payment: i64,
    /// The end of the WAL just after its commit.
    committed_at: String,
}

#[test]
fn six_kills_leave_one_effect_of_each_payment_and_a_wrong_consumer_loses_one() {
    let (broker, proxy) = broker_behind_a_proxy();
    let system = System::new(Cluster::shared(Pg::V18), &broker, proxy.bootstrap());
    let mut relay = system.relay(&[]);
    relay.wait_for_text("streaming from", MINUTE);
    let mut theatre = Theatre {
        relay,
        ledger: system.start(system.consumer("ledger", 0), None),
        _payout: system.start(system.consumer("payout", 0), None),
        ledger_name: "ledger",
        payment: 1,
        committed_at: String::new(),
        proxy: &proxy,
        system,
    };
    // Everybody has seen the topic before the first scene.
    theatre.system.pay(theatre.payment);
    theatre.settle();

    let scenes: [Scene<'_>; 7] = [
        Theatre::writer_before_commit,
        Theatre::writer_after_commit,
        Theatre::relay_ack_lost,
        Theatre::relay_record_lost,
        Theatre::relay_after_ack,
        Theatre::ledger_mid_effect,
        Theatre::ledger_before_offset,
    ];
    let mut seen = Vec::new();
    for (kill, scene) in KILLS.iter().zip(scenes) {
        seen.push(theatre.play(&kill.before, scene));
    }
    let balance = judge(&theatre.system);
    let wrong = KILLS.last().expect("the wrong one is the last");
    theatre.put_the_wrong_ledger_in();
    seen.push(theatre.play(&wrong.before, Theatre::ledger_mid_effect));

    print(&seen);
    for (kill, seen) in KILLS.iter().zip(&seen) {
        assert_eq!(seen.before, kill.before, "{}: before the heal", kill.name);
        assert_eq!(seen.after, kill.after, "{}: after the heal", kill.name);
    }
    assert_eq!(seen.len(), KILLS.len());
    assert!(balance.complaints.is_empty(), "{:?}", balance.complaints);
    theatre.relay.stop();
}

impl<'a> Theatre<'a> {
    /// One payment, one kill, and what becomes of it.
    fn play(&mut self, expected: &Holds, scene: Scene<'a>) -> Seen {
        self.payment += 1;
        let (before, killed) = scene(self, expected);
        self.settle();
        let took = killed.elapsed();
        Seen {
            before,
            after: self.holds(),
            took,
        }
    }

    fn pay(&mut self) {
        self.system.pay(self.payment);
        self.note_commit();
    }

    /// Everything that is committed has been relayed, and every record been consumed.
    fn settle(&self) {
        self.system.wait_confirmed(MINUTE);
        self.system.wait_caught_up(self.ledger_name, MINUTE);
        self.system.wait_caught_up("payout", MINUTE);
    }

    fn paused(&self, point: Point) -> Option<(Point, i64)> {
        Some((point, self.payment))
    }

    fn restart_ledger(&mut self, pause_at: Option<(Point, i64)>) {
        let role = self.system.consumer(self.ledger_name, 0);
        self.ledger = self.system.start(role, pause_at);
    }

    fn writer_before_commit(&mut self, expected: &Holds) -> (Holds, Instant) {
        self.kill_writer(Point::BeforeCommit, expected)
    }

    fn writer_after_commit(&mut self, expected: &Holds) -> (Holds, Instant) {
        self.relay.stop();
        let seen = self.kill_writer(Point::AfterCommit, expected);
        self.relay = self.system.relay(&[]);
        seen
    }

    /// The writer dies at a point; then his customer, who knows nothing, tries again.
    fn kill_writer(&mut self, point: Point, expected: &Holds) -> (Holds, Instant) {
        let role = Role::Payer { id: self.payment };
        let mut writer = self.system.start(role, self.paused(point));
        writer.wait_paused();
        self.note_commit();
        writer.kill9();
        let killed = Instant::now();
        let before = self.comes_to(expected);
        self.pay();
        (before, killed)
    }

    fn relay_ack_lost(&mut self, expected: &Holds) -> (Holds, Instant) {
        self.kill_relay(Way::SwallowsAcks, expected)
    }

    fn relay_record_lost(&mut self, expected: &Holds) -> (Holds, Instant) {
        self.kill_relay(Way::SwallowsRecords, expected)
    }

    fn kill_relay(&mut self, way: Way, expected: &Holds) -> (Holds, Instant) {
        self.relay.wait_for_text("streaming from", MINUTE);
        self.proxy.set(way);
        self.pay();
        eventually(MINUTE, format!("the proxy {way:?}"), || {
            (self.proxy.swallowed() > 0).then_some(())
        });
        let before = self.comes_to(expected);
        self.relay.kill9();
        let killed = Instant::now();
        self.proxy.set(Way::Open);
        self.relay = self.system.relay(&[]);
        (before, killed)
    }

    fn relay_after_ack(&mut self, expected: &Holds) -> (Holds, Instant) {
        self.relay.stop();
        // Nothing else is on its way: the first delivery is the payment's.
        let fault = [("WALRELAY_FAULT", "delivered=kill")];
        self.relay = self.system.relay(&fault);
        self.relay.wait_for_text("streaming from", MINUTE);
        self.pay();
        assert_eq!(self.relay.wait_exit(MINUTE), -9, "it kills itself there");
        let killed = Instant::now();
        let before = self.comes_to(expected);
        self.relay = self.system.relay(&[]);
        (before, killed)
    }

    fn ledger_mid_effect(&mut self, expected: &Holds) -> (Holds, Instant) {
        self.kill_ledger(Point::MidEffect, expected)
    }

    fn ledger_before_offset(&mut self, expected: &Holds) -> (Holds, Instant) {
        self.kill_ledger(Point::BeforeOffset, expected)
    }

    fn kill_ledger(&mut self, point: Point, expected: &Holds) -> (Holds, Instant) {
        self.ledger.kill9();
        self.restart_ledger(self.paused(point));
        self.pay();
        self.ledger.wait_paused();
        let before = self.comes_to(expected);
        self.ledger.kill9();
        let killed = Instant::now();
        self.restart_ledger(None);
        (before, killed)
    }

    /// A third group, with effects of its own, that reads from here on.
    fn put_the_wrong_ledger_in(&mut self) {
        self.ledger.kill9();
        self.ledger_name = "wrong";
        let effects = self.system.effects.connect();
        // What the right one did counts as done.
        effects.run(
            "insert into processed_events (consumer, event_id)
             select 'wrong', event_id from processed_events where consumer = 'ledger'",
        );
        self.restart_ledger(None);
        self.settle();
    }

    /// Waits until it holds what it should; what it holds instead is for the table.
    fn comes_to(&self, expected: &Holds) -> Holds {
        let until = Instant::now() + Duration::from_secs(20);
        eventually_says(
            MINUTE,
            || "it answers".to_owned(),
            || {
                let holds = self.holds();
                (holds == *expected || Instant::now() > until).then_some(holds)
            },
        )
    }

    fn holds(&self) -> Holds {
        let System {
            source, effects, ..
        } = &self.system;
        let (source, effects) = (source.connect(), effects.connect());
        let payment = Payment::numbered(self.payment);
        let event = self.system.event_id(&source, payment.id);
        let count = |sql: &Sql, from: String| -> usize {
            let count = sql.one(&format!("select count(*) from {from}"));
            count.parse().expect("a count")
        };
        let records = self.system.broker.read_all(&self.system.topic);
        let records: Vec<&Rec> = records.iter().filter(|r| r.event_id() == event).collect();
        let group = self.system.group(self.ledger_name);
        let committed = Offsets::of(self.system.broker, &group).committed(&self.system.topic);
        let is_past = |record: &&Rec| {
            let partition = usize::try_from(record.partition).expect("from 0");
            committed
                .as_ref()
                .and_then(|next| next.get(partition))
                .is_some_and(|next| *next > record.offset)
        };
        let is_committed = count(&source, format!("payment where id = {}", payment.id)) > 0;
        Holds {
            payment: usize::from(is_committed),
            outbox: count(&source, format!("outbox where event_id = '{event}'")),
            slot: is_committed && self.system.is_past(&source, &self.committed_at),
            records: records.len(),
            ledger: count(
                &effects,
                format!(
                    "ledger_entry where payment = {} and account <> 'customers'",
                    payment.id
                ),
            ),
            payout: count(&effects, format!("payout where payment = {}", payment.id)),
            offset: !records.is_empty() && records.iter().all(is_past),
        }
    }

    /// The position behind the payment's commit.
    fn note_commit(&mut self) {
        let source = self.system.source.connect();
        self.committed_at = source.one("select pg_current_wal_insert_lsn()");
    }
}

fn print(seen: &[Seen]) {
    let mut text = format!(
        "\n{:<46}heal    payment outbox slot records ledger payout offset  repeats  healed\n",
        "kill -9 of"
    );
    for (kill, seen) in KILLS.iter().zip(seen) {
        let Seen {
            before,
            after,
            took,
        } = seen;
        text.push_str(&format!(
            "{:<46}before  {before}\n{:<46}after   {after}  {:>7}  in {:.2} s by {}\n",
            kill.name,
            "",
            after.records.saturating_sub(1),
            took.as_secs_f64(),
            kill.healed_by,
        ));
    }
    // Past the harness, which shows what is printed for failed tests only.
    let _ = io::stderr().write_all(text.as_bytes());
}
