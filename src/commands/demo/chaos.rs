//! `walrelay demo --chaos`: a payments service, a ledger and two relays, each a process of its own,
//! are killed with SIGKILL one after the other, and Postgres and the broker with them. In the end
//! the books must balance: each committed payment has exactly one entry in the ledger.
//!
//! # Invariants
//! - The balance is computed from what the two tables hold, by SQL that a person can read.
//! - The parts end with this process, whatever ends it: they watch the pipe that it holds.

mod parts;

use std::time::{Duration, Instant};

use super::Setting;
use super::binaries::Binaries;
use super::server::Server;
use super::show::{self, Style};
use crate::config::{Database, DemoConfig};
use crate::error::{Exit, Failure};
use crate::io::connect;
use crate::io::kafka::{self, Reader};
use crate::io::side::{Side, db_error};
use crate::service::Termination;
pub use parts::play;
use parts::{Part, Role};

const LENGTH_DEFAULT: Duration = Duration::from_secs(30);
const RATE_DEFAULT: u32 = 100;
const PAUSE: Duration = Duration::from_millis(2200);
/// What is missing after so long without a further entry is lost.
const SILENCE_MAX: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What a relay logs when it takes the lead; each process has a log of its own.
const LEADS: &str = "leading: the lock is ours";
const OUTAGE: Duration = Duration::from_secs(1);

const CONSUMER_KIT: &str = include_str!("../../../migrations/consumer.sql");
/// Nothing in the ledger is unique: what is entered twice is there twice.
const TABLES: &str = "
create table public.payment (
  id      bigint generated always as identity primary key,
  account text   not null,
  seq     bigint not null,
  cents   bigint not null,
  unique (account, seq)
);
create table public.ledger (
  n       bigint generated always as identity,
  payment bigint not null,
  account text   not null,
  seq     bigint not null,
  cents   bigint not null
)";
const BALANCE: &str = "
select (select count(*) from public.payment),
       (select coalesce(sum(cents), 0)::bigint from public.payment),
       (select count(*) from public.ledger),
       (select coalesce(sum(cents), 0)::bigint from public.ledger),
       (select count(*) from public.payment p
         where not exists (select from public.ledger l where l.payment = p.id and l.cents = p.cents)),
       (select count(*) from (select from public.ledger group by payment having count(*) > 1) twice),
       (select count(*) from public.ledger l
         where not exists (select from public.payment p where p.id = l.payment)),
       (select count(*) from (
          select seq, row_number() over (partition by account order by n) as place
          from public.ledger) entry where seq <> place)";

/// What is killed, in this order, again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Leader,
    Standby,
    Shop,
    Ledger,
    Postgres,
    /// Simulated as the broker is: it refuses connections for a while.
    Broker,
}

const VICTIMS: [Victim; 8] = [
    Victim::Leader,
    Victim::Ledger,
    Victim::Shop,
    Victim::Postgres,
    Victim::Leader,
    Victim::Ledger,
    Victim::Broker,
    Victim::Standby,
];

/// What the tables say in the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    pub payments: i64,
    pub payment_cents: i64,
    pub entries: i64,
    pub entry_cents: i64,
    pub missing: i64,
    pub twice: i64,
    pub strangers: i64,
    pub out_of_order: i64,
}

impl Balance {
    #[must_use]
    pub fn holds(&self) -> bool {
        self.payments == self.entries
            && self.payment_cents == self.entry_cents
            && self.missing == 0
            && self.twice == 0
            && self.strangers == 0
            && self.out_of_order == 0
    }
}

/// # Errors
/// Something could not be had (exit 3), broke, or the books do not balance (exit 1).
pub async fn run(config: DemoConfig) -> Result<(), Failure> {
    let style = Style::of_stdout();
    let mut asked = Termination::listen()?;
    show::chaos_title(style);
    let mut stage = tokio::select! {
        stage = Stage::prepare(&config, style) => stage?,
        () = asked.next() => return super::too_early(),
    };
    let length = config.seconds.unwrap_or(LENGTH_DEFAULT);
    let kills = stage.kill_for(length, &mut asked).await?;
    stage.shop = None;
    show::say("\nThe shop is closed; nobody is killed any more. Waiting for the last entries.");
    let balance = tokio::select! {
        balance = stage.settle() => balance?,
        () = asked.next() => return Err(super::aborted()),
    };
    let records = stage.records()?;
    show::balance(style, &balance, kills, records);
    show::struck(&stage.setting);
    conclude(&balance)
}

fn conclude(balance: &Balance) -> Result<(), Failure> {
    if balance.holds() {
        return Ok(());
    }
    Err(Failure::new(
        Exit::Unexpected,
        "the ledger is not what the payments are",
        "report this as a bug, with the lines above",
    ))
}

struct Stage {
    // Dropped in this order: the parts before what they work with.
    relays: [Part; 2],
    ledger: Part,
    shop: Option<Part>,
    server: Server,
    binaries: Binaries,
    kafka: kafka::Settings,
    setting: Setting,
    rate: u32,
    style: Style,
}

impl Stage {
    async fn prepare(config: &DemoConfig, style: Style) -> Result<Stage, Failure> {
        let binaries = Binaries::find(config.pg_bin.as_deref())?;
        let (to_kafka, kafka, prefix) = super::broker(config)?;
        let topic = super::make_topic(&to_kafka, &kafka, &prefix).await?;
        let server = Server::start(&binaries).await?;
        let setting = super::setting(&binaries, &server, &kafka, topic);
        show::setting(style, &setting);
        let source = super::source(server.database());
        let side = super::set_up(&source, TABLES, style).await?;
        let kit = format!("set search_path = public; {CONSUMER_KIT}");
        side.run(&kit)
            .await
            .map_err(|error| super::broken(&error))?;
        let rate = config.rate.unwrap_or(RATE_DEFAULT);
        let start = |role| Part::start(role, &setting, &prefix, rate);
        Ok(Stage {
            relays: [start(Role::Relay)?, start(Role::Relay)?],
            ledger: start(Role::Ledger)?,
            shop: Some(start(Role::Shop)?),
            server,
            binaries,
            kafka,
            setting,
            rate,
            style,
        })
    }

    fn database(&self) -> Database {
        self.server.database()
    }

    /// Kills one after the other until the time is over; how many.
    async fn kill_for(
        &mut self,
        length: Duration,
        asked: &mut Termination,
    ) -> Result<usize, Failure> {
        show::chaos_curtain(self.style, self.rate, length);
        let closing = Instant::now() + length;
        let mut kills = 0;
        for victim in VICTIMS.into_iter().cycle() {
            if Instant::now() + PAUSE > closing {
                break;
            }
            let until = Instant::now() + PAUSE;
            while Instant::now() < until {
                tokio::select! {
                    () = tokio::time::sleep(LOOK_EVERY) => self.supervise()?,
                    () = asked.next() => return Ok(kills),
                }
            }
            if let Some(who) = self.kill(victim).await? {
                kills += 1;
                let balance = self.balance().await?;
                show::kill(self.style, kills, &who, &balance);
            }
        }
        Ok(kills)
    }

    /// Who has ended is started again, as a service manager would.
    fn supervise(&mut self) -> Result<(), Failure> {
        let shop = self.shop.as_mut();
        for part in self.relays.iter_mut().chain([&mut self.ledger]).chain(shop) {
            part.revive()?;
        }
        Ok(())
    }

    /// Kills, and says whom; `None`: there is no such victim here.
    async fn kill(&mut self, victim: Victim) -> Result<Option<String>, Failure> {
        let who = match victim {
            Victim::Leader => {
                let at = self.leader();
                self.relays[at].kill9()
            }
            Victim::Standby => {
                let at = 1 - self.leader();
                self.relays[at].kill9()
            }
            Victim::Shop => self.shop.as_mut().map_or_else(String::new, Part::kill9),
            Victim::Ledger => self.ledger.kill9(),
            Victim::Postgres => {
                self.server.kill9();
                self.server.restart(&self.binaries).await?;
                return Ok(Some("Postgres, every process of it".to_owned()));
            }
            Victim::Broker => {
                let Some(mock) = self.kafka.mock() else {
                    return Ok(None);
                };
                mock.fail();
                tokio::time::sleep(OUTAGE).await;
                mock.recover();
                return Ok(Some("the broker: away for a second".to_owned()));
            }
        };
        let name = match victim {
            Victim::Leader => "the leading relay",
            Victim::Standby => "the standby relay",
            Victim::Shop => "the shop",
            Victim::Ledger | Victim::Postgres | Victim::Broker => "the ledger",
        };
        Ok(Some(format!("{name}, {who}")))
    }

    /// The relay that leads; where none does, the first.
    fn leader(&self) -> usize {
        usize::from(!self.relays[0].has_said(LEADS) && self.relays[1].has_said(LEADS))
    }

    async fn connect(&self) -> Result<Side, Failure> {
        let database = self.database();
        Side::connect(&database, None)
            .await
            .map_err(|error| connect::failure(&error, &database))
    }

    async fn balance(&self) -> Result<Balance, Failure> {
        let side = self.connect().await?;
        let row = side
            .client
            .query_one(BALANCE, &[])
            .await
            .map_err(|error| super::broken(&db_error(&error)))?;
        Ok(Balance {
            payments: row.get(0),
            payment_cents: row.get(1),
            entries: row.get(2),
            entry_cents: row.get(3),
            missing: row.get(4),
            twice: row.get(5),
            strangers: row.get(6),
            out_of_order: row.get(7),
        })
    }

    /// Until every payment has its entry, or nothing more comes; and what was in the topic then has
    /// been seen by the ledger once more, so that a repetition had its chance.
    async fn settle(&mut self) -> Result<Balance, Failure> {
        let mut last = (self.balance().await?, Instant::now());
        while last.0.missing > 0 && last.1.elapsed() < SILENCE_MAX {
            self.supervise()?;
            tokio::time::sleep(LOOK_EVERY * 5).await;
            let balance = self.balance().await?;
            if balance != last.0 {
                last = (balance, Instant::now());
            }
        }
        // A ledger that begins anew reads everything again; it says when it has.
        self.ledger.kill9();
        self.ledger.revive()?;
        let until = Instant::now() + SILENCE_MAX;
        while !self.ledger.has_said(parts::READ_TO_THE_END) && Instant::now() < until {
            self.supervise()?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.balance().await
    }

    /// How many records the topic holds.
    fn records(&self) -> Result<i64, Failure> {
        let topic = &self.setting.topic;
        let count = || -> Result<i64, String> {
            let reader = Reader::new(&self.kafka, topic, super::PARTITIONS)?;
            let extents = reader.extents()?;
            Ok(extents.iter().map(|extent| extent.end).sum())
        };
        count().map_err(|error| super::unread(topic, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn books_that_do_not_balance_are_exit_1() {
        let whole = Balance {
            payments: 2,
            payment_cents: 300,
            entries: 2,
            entry_cents: 300,
            ..Balance::default()
        };
        assert_eq!(conclude(&whole), Ok(()));
        let broken = [
            Balance {
                entries: 1,
                missing: 1,
                ..whole
            },
            Balance {
                entries: 3,
                twice: 1,
                ..whole
            },
            Balance {
                entry_cents: 301,
                ..whole
            },
            Balance {
                strangers: 1,
                ..whole
            },
            Balance {
                out_of_order: 1,
                ..whole
            },
        ];
        for balance in broken {
            let failure = conclude(&balance).expect_err("it does not balance");
            assert_eq!(failure.exit, Exit::Unexpected, "{balance:?}");
        }
    }
}
