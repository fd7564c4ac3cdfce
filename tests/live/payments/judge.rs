//! Does every committed payment have exactly one effect of each kind, and in the order of its
//! account? Judged by what the databases and the topic hold.

use std::collections::HashMap;

use super::System;
use crate::check::{Committed, Verdict, check};
use crate::postgres::Sql;

/// What the whole system holds in the end.
pub struct Balance {
    pub payments: usize,
    pub cents: i64,
    pub in_topic: Verdict,
    /// One sentence for each thing that is wrong.
    pub complaints: Vec<String>,
}

pub fn judge(system: &System<'_>) -> Balance {
    let (source, effects) = (system.source.connect(), system.effects.connect());
    let payments = numbers(
        &source,
        "select id, cents from payment order by account, seq",
    );
    let mut complaints = Vec::new();
    let mut note = |complaint: Option<String>| complaints.extend(complaint);

    let entries = numbers(
        &effects,
        "select payment, cents from ledger_entry where account <> 'customers'",
    );
    note(compare("the ledger", &payments, &entries));
    let counter_entries = numbers(
        &effects,
        "select payment, -cents from ledger_entry where account = 'customers'",
    );
    note(compare(
        "the ledger's other side",
        &payments,
        &counter_entries,
    ));
    let payouts = numbers(&effects, "select payment, cents from payout");
    note(compare("the payouts", &payments, &payouts));

    let balances = |sql: &Sql, text| sql.rows(text);
    let expected = balances(
        &source,
        "select account, count(*), sum(cents) from payment group by 1 order by 1",
    );
    let kept = balances(
        &effects,
        "select account, payments, cents from ledger_balance order by 1",
    );
    note((expected != kept).then(|| "the balances of accounts are not their payments".to_owned()));
    let unordered = effects.one(
        "select count(*) from (
           select seq, row_number() over (partition by account order by n) as place
           from ledger_entry where account <> 'customers') e
         where seq <> place",
    );
    note((unordered != "0").then(|| format!("{unordered} effects out of their account's order")));

    let mut committed = Committed::new();
    for row in source.rows(
        "select account, outbox_event_id('payment-' || id, 'captured') from payment order by account, seq",
    ) {
        let mut texts = row.into_iter().map(Option::unwrap_or_default);
        let (account, event) = (texts.next(), texts.next());
        committed.push(account.unwrap_or_default(), event.unwrap_or_default());
    }
    let in_topic = check(&system.broker.read_all(&system.topic), &committed);
    let Verdict {
        lost,
        invented,
        reordered,
        ..
    } = &in_topic;
    for (what, found) in [
        ("lost", lost),
        ("invented", invented),
        ("out of order", reordered),
    ] {
        note((!found.is_empty()).then(|| format!("topic: {} {what}", found.len())));
    }
    Balance {
        payments: payments.len(),
        cents: payments.iter().map(|(_, cents)| cents).sum(),
        in_topic,
        complaints,
    }
}

fn numbers(sql: &Sql, query: &str) -> Vec<(i64, i64)> {
    let number = |text: &Option<String>| text.as_deref().and_then(|t| t.parse().ok());
    sql.rows(query)
        .iter()
        .map(|row| {
            let pair = number(&row[0]).zip(number(&row[1]));
            pair.expect("two numbers")
        })
        .collect()
}

/// Each payment once, with its amount.
fn compare(what: &str, payments: &[(i64, i64)], effects: &[(i64, i64)]) -> Option<String> {
    let mut open: HashMap<(i64, i64), i64> = payments.iter().map(|p| (*p, 1)).collect();
    for effect in effects {
        *open.entry(*effect).or_default() -= 1;
    }
    let missing = open.values().filter(|n| **n > 0).count();
    let surplus: i64 = open.values().filter(|n| **n < 0).map(|n| -n).sum();
    (missing > 0 || surplus > 0)
        .then(|| format!("{what}: {missing} payments without effect, {surplus} effects too many"))
}

#[test]
fn a_missing_and_a_double_effect_are_seen() {
    let payments = [(1, 100), (2, 200)];
    assert_eq!(compare("x", &payments, &payments), None);
    assert!(compare("x", &payments, &payments[..1]).is_some());
    assert!(compare("x", &payments, &[(1, 100), (2, 200), (2, 200)]).is_some());
    assert!(compare("x", &payments, &[(1, 100), (2, 201)]).is_some());
}
