//! The ledger against a slow, obviously right model: every transaction and every row is kept for
//! ever, and every answer is worked out anew from all of them.

use std::collections::{BTreeMap, BTreeSet};

use walrelay::lsn::{Lsn, PgTimestamp, Triple};
use walrelay::record::{Size, Ticket};
use walrelay::relay::ledger::{Ledger, Load, OtherHistory, Take};

use crate::history::triple;
use crate::rng::Rng;

const LIVES: u64 = 4_000;

#[derive(Clone, Debug)]
struct Txn {
    triple: Triple,
    end_lsn: Lsn,
    rows: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    InFlight,
    Held,
    Delivered,
    Lost,
}

#[derive(Clone, Debug)]
struct Event {
    ticket: Ticket,
    state: State,
    footprint: usize,
}

/// (transaction, row)
type Place = (usize, usize);

/// A position that the server sent, and how many events had to be delivered for it.
#[derive(Clone, Debug)]
struct Mark {
    lsn: Lsn,
    taken: Vec<Place>,
}

#[derive(Clone, Debug, Default)]
struct Model {
    wal: Vec<Txn>,
    events: BTreeMap<Place, Event>,
    /// Transactions whose Commit was seen, in any session.
    whole: BTreeSet<usize>,
    /// Below this transaction nothing is remembered: where a stop was resumed.
    floor: Option<usize>,
    /// The last transaction of the contiguous delivered prefix.
    w: Option<usize>,
    // This session.
    came_by: BTreeSet<usize>,
    marks: Vec<Mark>,
    receiving: Option<usize>,
}

impl Model {
    /// Transactions of which something was taken, in commit order.
    fn taken(&self) -> BTreeSet<usize> {
        self.events.keys().map(|(txn, _)| *txn).collect()
    }

    fn is_delivered(&self, place: &Place) -> bool {
        self.events
            .get(place)
            .is_some_and(|e| e.state == State::Delivered)
    }

    /// W goes on over what is delivered and whole, and not just coming by.
    fn settle(&mut self) {
        for txn in self.taken() {
            if self.w.is_some_and(|w| txn <= w) {
                continue;
            }
            let mut rows = self.events.range((txn, 0)..(txn + 1, 0));
            let is_delivered = rows.all(|(place, _)| self.is_delivered(place));
            if !is_delivered || !self.whole.contains(&txn) || self.receiving == Some(txn) {
                break;
            }
            self.w = Some(txn);
        }
    }

    /// Transactions that have to come by again before anything else counts.
    fn awaited(&self) -> BTreeSet<usize> {
        let w = self.w;
        let mut awaited: BTreeSet<usize> = self.taken();
        awaited.retain(|txn| w.is_none_or(|w| *txn > w));
        awaited.extend(w);
        awaited.retain(|txn| !self.came_by.contains(txn));
        awaited
    }

    fn mark(&mut self, lsn: Lsn) {
        let taken = self.events.keys().copied().collect();
        self.marks.push(Mark { lsn, taken });
    }

    fn flush(&self) -> Lsn {
        let counts = |m: &&Mark| m.taken.iter().all(|place| self.is_delivered(place));
        let positions = self.marks.iter().filter(counts).map(|m| m.lsn);
        positions.max().unwrap_or(Lsn::INVALID)
    }

    fn with(&self, state: State) -> impl Iterator<Item = (&Place, &Event)> {
        self.events.iter().filter(move |(_, e)| e.state == state)
    }

    fn span(&self) -> usize {
        let mut places = self.events.keys().skip_while(|p| self.is_delivered(p));
        places.by_ref().count()
    }
}

struct Life {
    rng: Rng,
    model: Model,
    ledger: Ledger,
    /// The next message of the session: transaction, step; `None` between sessions.
    cursor: Option<(usize, usize)>,
    confirmed: Lsn,
    log: Vec<String>,
}

fn wal(rng: &mut Rng) -> Vec<Txn> {
    let mut lsn = 1_000;
    let mut wal = Vec::new();
    for index in 0..rng.count(2, 9) {
        // Neighbours: one's end is the next one's beginning.
        if !rng.permille(400) {
            lsn += rng.range(8, 100);
        }
        let is_ours = rng.permille(850);
        let rows = if is_ours { rng.count(1, 5) } else { 0 };
        let xid = 700 + u32::try_from(index).expect("small");
        let time = PgTimestamp(i64::try_from(index).expect("small") * 10);
        wal.push(Txn {
            triple: triple(lsn, xid, time),
            end_lsn: Lsn(lsn + 0x30),
            rows: (0..rows).map(|row| format!("{index}.{row}")).collect(),
        });
        lsn += 0x30;
    }
    wal
}

impl Life {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let model = Model {
            wal: wal(&mut rng),
            ..Model::default()
        };
        let mut life = Life {
            rng,
            model,
            ledger: Ledger::default(),
            cursor: None,
            confirmed: Lsn(900),
            log: Vec::new(),
        };
        life.open();
        life
    }

    /// A new session, from where the server stands or from as far back as its last restart took it.
    fn open(&mut self) {
        self.confirmed = match self.rng.range(0, 3) {
            0 => Lsn(900),
            1 => self.confirmed.max(self.ledger.flush()),
            _ => self.confirmed,
        };
        self.open_at(self.confirmed);
    }

    fn open_at(&mut self, confirmed: Lsn) {
        self.confirmed = confirmed;
        let skipped = |t: &Txn| t.triple.commit_lsn < confirmed;
        let first = self.model.wal.iter().take_while(|t| skipped(t)).count();
        self.ledger.session_started(confirmed);
        self.model.marks.clear();
        self.model.receiving = None;
        self.model.came_by = (0..first).collect();
        self.cursor = Some((first, 0));
        self.log.push(format!("session from {confirmed}"));
    }

    fn close(&mut self) {
        // What was told to the server by then.
        if self.rng.permille(500) {
            self.confirmed = self.confirmed.max(self.ledger.flush());
        }
        self.cursor = None;
        self.log.push("cut".to_owned());
    }

    /// One more message of the session.
    fn receive(&mut self) -> Result<(), OtherHistory> {
        let Some((index, step)) = self.cursor else {
            return Ok(());
        };
        let Some(txn) = self.model.wal.get(index).cloned() else {
            return self.keepalive();
        };
        if step == 0 {
            if self.rng.permille(150) {
                return self.keepalive();
            }
            self.log.push(format!("begin {}", txn.triple));
            self.ledger.begin(txn.triple);
            self.model.receiving = Some(index);
            self.cursor = Some((index, 1));
            return Ok(());
        }
        if self.rng.permille(100) {
            return self.keepalive();
        }
        if let Some(row) = txn.rows.get(step - 1) {
            self.cursor = Some((index, step + 1));
            return self.insert((index, step - 1), row);
        }
        self.cursor = Some((index + 1, 0));
        self.commit(index, &txn)
    }

    fn insert(&mut self, place: Place, row: &str) -> Result<(), OtherHistory> {
        let take = self.ledger.insert(row.as_bytes())?;
        self.log.push(format!("insert {row}: {take:?}"));
        let is_below = self.model.floor.is_some_and(|floor| place.0 <= floor);
        let known = self.model.events.get(&place).map(|e| (e.ticket, e.state));
        match (known, take) {
            (None, Take::PassOver) => assert!(is_below, "{row} was never taken"),
            (None, Take::New(ticket)) => {
                assert!(!is_below, "{row} was delivered before the stop");
                let is_fresh = self.model.events.values().all(|e| e.ticket < ticket);
                assert!(is_fresh, "{ticket:?} was given before");
                self.place(place, ticket);
            }
            (Some((old, State::Lost)), Take::Again(ticket)) => {
                assert_eq!(old, ticket, "{row} has another ticket");
                self.place(place, ticket);
            }
            (Some((_, State::Lost)), Take::PassOver) => panic!("{row} is lost for good"),
            (Some(_), Take::PassOver) => {}
            (known, take) => panic!("{row} is {known:?} and the ledger says {take:?}"),
        }
        Ok(())
    }

    fn place(&mut self, place: Place, ticket: Ticket) {
        let footprint = self.rng.count(1, 1_000);
        let size = Size {
            footprint,
            content: footprint / 2,
        };
        let state = if self.rng.permille(250) {
            self.ledger.held(ticket, 3, size);
            State::Held
        } else {
            self.ledger.sent(ticket, 3, size);
            State::InFlight
        };
        let event = Event {
            ticket,
            state,
            footprint,
        };
        self.model.events.insert(place, event);
    }

    fn commit(&mut self, index: usize, txn: &Txn) -> Result<(), OtherHistory> {
        let w = self.model.w;
        let is_missed = !self.model.awaited().is_empty();
        self.ledger.commit(txn.end_lsn)?;
        self.log.push(format!("commit, end {}", txn.end_lsn));
        self.model.came_by.insert(index);
        self.model.receiving = None;
        if txn.rows.is_empty() {
            if !is_missed {
                self.model.mark(txn.end_lsn);
            }
            return Ok(());
        }
        self.model.whole.insert(index);
        if w.is_none_or(|w| index >= w) {
            // Only what was taken up to here has to be delivered.
            let upto = self.model.events.range(..(index + 1, 0));
            let taken = upto.map(|(place, _)| *place).collect();
            let lsn = txn.end_lsn;
            self.model.marks.push(Mark { lsn, taken });
        }
        Ok(())
    }

    fn keepalive(&mut self) -> Result<(), OtherHistory> {
        let (index, step) = self.cursor.expect("in a session");
        let before = index.checked_sub(1).map(|i| self.model.wal[i].end_lsn);
        let next = self.model.wal.get(index).map(|t| t.triple.commit_lsn);
        let low = before.unwrap_or(self.confirmed).max(self.confirmed).0;
        let wal_end = match next {
            Some(next) if step > 0 => next,
            Some(next) => Lsn(self.rng.range(low.min(next.0), next.0 + 1)),
            None => Lsn(self.rng.range(low, low + 50)),
        };
        self.ledger.keepalive(wal_end)?;
        self.log.push(format!("keepalive {wal_end}"));
        if step == 0 && self.model.awaited().is_empty() {
            self.model.mark(wal_end);
        }
        Ok(())
    }

    fn deliver(&mut self) {
        let open: Vec<Place> = self
            .model
            .events
            .iter()
            .filter(|(_, e)| matches!(e.state, State::InFlight | State::Held))
            .map(|(place, _)| *place)
            .collect();
        if open.is_empty() {
            return;
        }
        for _ in 0..self.rng.count(1, 4) {
            let place = *self.rng.pick(&open);
            let event = self.model.events.get_mut(&place).expect("listed");
            let known = self.ledger.delivered(event.ticket);
            assert_eq!(known.is_some(), event.state != State::Delivered);
            if let Some(known) = known {
                let time = self.model.wal[place.0].triple.commit_time;
                assert_eq!(
                    (known.content as usize, known.topic),
                    (event.footprint / 2, 3)
                );
                assert_eq!(known.commit_time, time);
            }
            event.state = State::Delivered;
            self.log.push(format!("delivered {place:?}"));
        }
        self.ledger.settle();
    }

    /// Refused: everything that is not delivered is read again.
    fn lose(&mut self) {
        self.log.push("everything undelivered is lost".to_owned());
        let open: Vec<Ticket> = self
            .model
            .with(State::InFlight)
            .map(|(_, e)| e.ticket)
            .collect();
        for ticket in open {
            if self.rng.permille(500) {
                self.ledger.lost(ticket);
            }
        }
        self.ledger.settle();
        self.ledger.lose_all();
        for event in self.model.events.values_mut() {
            if event.state != State::Delivered {
                event.state = State::Lost;
            }
        }
        self.close();
    }

    /// A stop, and another process that goes on after it.
    fn resume(&mut self) {
        self.log.push("stopped and resumed".to_owned());
        let w = self.ledger.w();
        assert_eq!(w, self.model.w.map(|w| self.model.wal[w].triple));
        let open = self.ledger.open_transaction();
        let last = self.model.taken().last().copied();
        self.model.floor = self.model.w;
        let kept = match &open {
            Some(open) => {
                let last = last.expect("something is open");
                assert_eq!(open.triple, self.model.wal[last].triple);
                assert_eq!(
                    open.last_event_id,
                    self.model.wal[last].rows[open.count - 1].as_bytes()
                );
                Some((last, open.count))
            }
            None => None,
        };
        self.model
            .events
            .retain(|place, _| kept.is_some_and(|(txn, _)| place.0 == txn));
        assert_eq!(self.model.events.len(), kept.map_or(0, |(_, count)| count));
        self.model.whole.clear();
        // Tickets are the process's own.
        for ((_, row), event) in &mut self.model.events {
            assert_eq!(event.state, State::Delivered);
            event.ticket = Ticket(*row);
        }
        self.ledger = Ledger::resumed(w, open);
        self.model.marks.clear();
        self.model.receiving = None;
        self.cursor = None;
    }

    fn check(&self) {
        let model = &self.model;
        assert_eq!(self.ledger.flush(), model.flush(), "flush");
        let w = model.w.map(|w| model.wal[w].triple);
        assert_eq!(self.ledger.w(), w, "W");
        assert_eq!(self.ledger.span(), model.span(), "span");
        assert_eq!(self.ledger.lost_events(), model.with(State::Lost).count());
        let load = self.ledger.load();
        let sum = |state| {
            let footprints = model.with(state).map(|(_, e)| e.footprint);
            footprints.fold((0, 0), |sum, bytes| (sum.0 + 1, sum.1 + bytes))
        };
        assert_eq!(
            (load.in_flight_events, load.in_flight_bytes),
            sum(State::InFlight)
        );
        assert_eq!((load.held_events, load.held_bytes), sum(State::Held));
        let oldest = model
            .events
            .iter()
            .find(|(_, e)| e.state != State::Delivered);
        let oldest = oldest.map(|(place, _)| model.wal[place.0].triple.commit_time);
        assert_eq!(self.ledger.oldest_undelivered(), oldest);
        // The promise itself, from first principles.
        for (index, txn) in model.wal.iter().enumerate() {
            let is_past = txn.triple.commit_lsn < self.ledger.flush();
            let is_floor = model.floor.is_some_and(|floor| index <= floor);
            for row in 0..txn.rows.len() {
                let is_delivered = is_floor || model.is_delivered(&(index, row));
                assert!(
                    !is_past || is_delivered,
                    "flush passes an undelivered event"
                );
            }
        }
    }

    fn step(&mut self) {
        match self.rng.range(0, 100) {
            _ if self.cursor.is_none() && self.rng.permille(600) => self.open(),
            0..62 => self
                .receive()
                .unwrap_or_else(|e| panic!("not another history: {e}")),
            62..90 => self.deliver(),
            90..94 => self.close(),
            94..97 => self.lose(),
            97 if self.cursor.is_none() && self.model.with(State::Lost).count() == 0 => {
                self.resume();
            }
            _ => {}
        }
        self.ledger.settle();
        self.model.settle();
    }

    /// Nothing fails any more: all is delivered, and the position is the server's own.
    fn settle(&mut self) {
        self.close();
        self.open();
        while self
            .cursor
            .is_some_and(|(index, _)| index < self.model.wal.len())
        {
            self.receive()
                .unwrap_or_else(|e| panic!("not another history: {e}"));
            self.ledger.settle();
            self.model.settle();
            self.check();
        }
        while self.ledger.span() > 0 {
            self.deliver();
            self.model.settle();
            self.check();
        }
        self.keepalive()
            .unwrap_or_else(|e| panic!("not another history: {e}"));
        self.check();
        let sent = self.model.marks.iter().map(|m| m.lsn).max();
        assert_eq!(Some(self.ledger.flush()), sent, "an idle slot moves");
    }
}

/// Runs lives and says which went wrong, with what had happened in it.
fn lives(name: &str, live: impl Fn(&mut Life)) {
    let only = std::env::var("LEDGER_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    for seed in only.map_or(1..LIVES, |seed: u64| seed..seed + 1) {
        let mut life = Life::new(seed);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| live(&mut life)));
        if let Err(panic) = result {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            panic!(
                "{name}, LEDGER_SEED={seed}: {}\nwal {:#?}\n{}",
                text.unwrap_or_default(),
                life.model.wal,
                life.log.join("\n")
            );
        }
    }
}

#[test]
fn the_ledger_is_what_the_model_says() {
    lives("model", |life| {
        for _ in 0..life.rng.count(10, 250) {
            life.step();
            life.check();
        }
        life.settle();
    });
}

/// What the next life of the log has in place of what was taken.
fn another_history(life: &mut Life) -> Option<usize> {
    let w = life.model.w;
    let taken: Vec<usize> = life.model.taken().into_iter().collect();
    // W itself, or something that was taken after it.
    let first = w.or(taken.first().copied())?;
    let choices: Vec<usize> = taken.iter().copied().filter(|t| *t >= first).collect();
    if choices.is_empty() {
        return None;
    }
    let changed = *life.rng.pick(&choices);
    let is_w = w == Some(changed);
    let is_last = Some(&changed) == taken.last();
    let is_whole = life.model.whole.contains(&changed);
    let count = life
        .model
        .events
        .range((changed, 0)..(changed + 1, 0))
        .count();
    let txn = &mut life.model.wal[changed];
    match life.rng.range(0, 7) {
        0 => txn.triple.xid.0 += 1_000,
        1 => txn.triple.commit_time.0 += 1,
        2 => txn.rows.clear(),
        // W is only recognised, its rows are not counted.
        3 if !is_w && is_whole => txn.rows.push("more".to_owned()),
        4 if !is_w && txn.rows.len() > 1 && is_whole => {
            txn.rows.pop();
        }
        5 if !is_w && is_last && !is_whole => txn.rows[count - 1] = "other".to_owned(),
        6 if !is_w && is_whole => txn.end_lsn.0 += 1,
        _ => txn.triple.xid.0 += 7,
    }
    Some(changed)
}

#[test]
fn another_history_is_noticed_before_anything_of_it_is_flushed() {
    lives("another history", |life| {
        for _ in 0..life.rng.count(5, 120) {
            life.step();
        }
        // Restored from a copy: the slot stands before the change.
        life.close();
        life.open_at(Lsn(900));
        life.ledger.settle();
        life.model.settle();
        let Some(changed) = another_history(life) else {
            return;
        };
        life.log
            .push(format!("another history from transaction {changed} on"));
        let fork = life.model.wal[changed].triple.commit_lsn;
        let is_there = !life.model.wal[changed].rows.is_empty();
        let noticed = loop {
            let is_past = life.cursor.is_none_or(|(index, _)| index > changed);
            assert!(!is_there || !is_past, "it came by whole");
            let at_end = life.cursor.is_none_or(|(i, _)| i >= life.model.wal.len());
            let result = if at_end {
                // Later WAL that is not ours.
                life.ledger.keepalive(Lsn(100_000))
            } else {
                let (index, step) = life.cursor.expect("in a session");
                feed(life, index, step)
            };
            assert!(life.ledger.flush() <= fork, "the new history is flushed");
            match result {
                Err(_) => break true,
                Ok(()) if at_end => break false,
                Ok(()) => {}
            }
        };
        assert!(noticed, "another history was taken for the same");
    });
}

#[test]
fn what_is_forgotten_is_forgotten_and_tickets_go_on() {
    lives("forget", |life| {
        for _ in 0..life.rng.count(5, 120) {
            life.step();
        }
        let before = life.model.events.values().map(|e| e.ticket).max();
        life.ledger.forget();
        assert_eq!((life.ledger.w(), life.ledger.span()), (None, 0));
        assert_eq!(life.ledger.flush(), Lsn::INVALID);
        assert_eq!(life.ledger.load(), Load::default());
        assert_eq!(life.ledger.open_transaction(), None);
        life.ledger.session_started(Lsn(10));
        // An older position with another transaction: nothing is known that would forbid it.
        life.ledger.begin(triple(20, 1, PgTimestamp(1)));
        let taken = life.ledger.insert(b"new");
        let Ok(Take::New(ticket)) = taken else {
            panic!("{taken:?}");
        };
        assert!(
            before.is_none_or(|before| ticket > before),
            "{ticket:?} again"
        );
    });
}

#[test]
fn a_server_that_goes_back_inside_a_session_has_another_history() {
    lives("back", |life| {
        for _ in 0..life.rng.count(5, 120) {
            life.step();
        }
        life.settle();
        let Some(last) = life.model.taken().last().copied().or(life.model.w) else {
            return;
        };
        let before = life.ledger.flush();
        let back = life.rng.range(0, 40);
        let lsn = life.model.wal[last].triple.commit_lsn.0 - back;
        life.ledger.begin(triple(lsn, 5_000, PgTimestamp(9_000)));
        let taken = life.ledger.insert(b"back");
        assert!(taken.is_err(), "{taken:?}");
        assert_eq!(life.ledger.flush(), before);
    });
}

/// A message of the new history, without the model's opinion.
fn feed(life: &mut Life, index: usize, step: usize) -> Result<(), OtherHistory> {
    let txn = life.model.wal[index].clone();
    if step == 0 {
        life.ledger.begin(txn.triple);
        life.cursor = Some((index, 1));
        return Ok(());
    }
    if let Some(row) = txn.rows.get(step - 1) {
        life.cursor = Some((index, step + 1));
        let taken = life.ledger.insert(row.as_bytes());
        assert!(
            row != "more" || taken.is_err(),
            "a row too many was passed over"
        );
        return taken.map(|_| ());
    }
    life.cursor = Some((index + 1, 0));
    life.ledger.commit(txn.end_lsn)
}
