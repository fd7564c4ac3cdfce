//! Remedies are typed as they stand: what a role lacks, and the columns that a table of one's own
//! may be given later.

use crate::check_command::Said;
use crate::postgres::{Cluster, Pg, Sql};
use crate::refusals::says;
use crate::relay::{Ended, run_to_end};
use crate::stage::{MINUTE, Stage};

const TABLE: &str = "\"Sales\".\"Out box\"";

/// A table of somebody's own that holds a row, in a schema that is open to its owner alone.
fn stage_with_a_table(pg: Pg) -> (Stage<'static>, Sql) {
    let mut stage = Stage::shared(pg);
    stage.source_args = vec!["--table".to_owned(), TABLE.to_owned()];
    stage.broker.create_topic(&stage.topic("t"), 1);
    let sql = stage.db.connect();
    sql.run(&format!(
        "create schema \"Sales\"; create table {TABLE} (event_id uuid primary key, \
         aggregate_type text, aggregate_id text, event_type text, payload jsonb, headers jsonb)"
    ));
    insert(&sql);
    (stage, sql)
}

fn insert(sql: &Sql) {
    sql.run(&format!(
        "insert into {TABLE} values (gen_random_uuid(), 't', 'k', 'e', '{{}}', '{{}}')"
    ));
}

fn init(stage: &Stage<'_>, more: &[&str]) -> Ended {
    let (url, slot) = (stage.db.url_as(&stage.user), stage.db.slot());
    let own = [
        "init",
        "--database-url",
        &url,
        "--slot",
        &slot,
        "--table",
        TABLE,
    ];
    run_to_end(&[&own, more].concat(), &[], MINUTE)
}

/// The remedy of a finding.
#[track_caller]
fn remedy(stage: &Stage<'_>, subject: &str) -> String {
    let said = Said::of(&stage.check(&["--json"]));
    let remedy = said.finding(subject)["remedy"].as_str();
    remedy.expect("a remedy").to_owned()
}

#[test]
fn the_first_check_names_all_that_init_will_need() {
    let (mut stage, sql) = stage_with_a_table(Pg::V15);
    let name = stage.db.name.clone();
    let (owner, role) = (format!("owner_{name}"), format!("walrelay_{name}"));
    sql.run(&format!(
        "create role {owner}; create role {role} login replication;
         alter schema \"Sales\" owner to {owner}; alter table {TABLE} owner to {owner}"
    ));
    stage.user.clone_from(&role);
    let grants = [
        format!("grant usage on schema \"Sales\" to \"{role}\""),
        format!("grant create on database \"{name}\" to \"{role}\""),
        format!("grant \"{owner}\" to \"{role}\""),
    ];
    let ended = stage.check(&["--json"]);
    let words: Vec<&str> = grants.iter().map(String::as_str).collect();
    says(&ended, 3, &words);
    Said::of(&ended).expect("init", "failed", &["--existing leave"]);
    // In the order in which they can be followed.
    let last = ended.stderr.lines().last().unwrap_or_default();
    let at = |word: &str| {
        last.find(word)
            .unwrap_or_else(|| panic!("no {word}: {last}"))
    };
    assert!(at(&grants[1]) < at("run `walrelay init`"), "{last}");
    // `init` says the same, all at once.
    says(&init(&stage, &[]), 3, &words);
    for grant in &grants {
        sql.run(grant);
    }
    let rest = Said::of(&stage.check(&["--json"]));
    rest.expect("init", "failed", &["holds 1 row", "--existing leave"]);
    assert!(!rest.finding("init").to_string().contains("grant"));
    init(&stage, &["--existing", "leave"]).expect_code(0);
    let ended = stage.check(&["--json"]).expect_code(0);
    let after = Said::of(&ended);
    assert!(!after.findings.iter().any(|f| f["group"] == "init"));
    drop(sql);
    drop(stage);
    Cluster::shared(Pg::V15)
        .connect("postgres")
        .run(&format!("drop role {role}, {owner}"));
}

#[test]
fn a_schema_where_init_must_create_is_granted_with_use_and_create() {
    let mut stage = Stage::shared(Pg::V18);
    let role = format!("walrelay_{}", stage.db.name);
    let sql = stage.db.connect();
    sql.run(&format!(
        "create role {role} login replication; create schema sales;
         grant create on database {} to {role}",
        stage.db.name
    ));
    stage.user.clone_from(&role);
    stage.source_args = vec!["--table".to_owned(), "sales.outbox".to_owned()];
    let grant = format!("grant usage, create on schema \"sales\" to \"{role}\"");
    assert_eq!(remedy(&stage, "init"), grant);
    sql.run(&grant);
    stage.try_init().expect_code(0);
    drop(sql);
    drop(stage);
    Cluster::shared(Pg::V18)
        .connect("postgres")
        .run(&format!("drop role {role}"));
}

#[test]
fn a_role_that_only_runs_is_told_all_that_it_lacks_at_once() {
    let (mut stage, sql) = stage_with_a_table(Pg::V18);
    let role = format!("runner_{}", stage.db.name);
    sql.run(&format!(
        "create role {role} login replication;
         alter table {TABLE} enable row level security"
    ));
    let printed = init(&stage, &["--print-sql", "--existing", "leave"]).expect_code(0);
    init(&stage, &["--existing", "leave"]).expect_code(0);
    stage.user.clone_from(&role);
    sql.run(&format!(
        "grant usage on schema walrelay to {role};
         grant select, insert, update, delete on all tables in schema walrelay to {role}"
    ));
    let grants = remedy(&stage, "rights on the table");
    assert_eq!(
        grants,
        format!(
            "grant usage on schema \"Sales\" to \"{role}\"; grant select on {TABLE} to \"{role}\""
        )
    );
    for grant in grants.split("; ") {
        let line = format!("--   {};", grant.replace(&format!("\"{role}\""), "ROLE"));
        assert!(printed.stdout.contains(&line), "no {line}");
    }
    says(
        &stage.check(&[]),
        3,
        &["row security hides rows", "bypassrls"],
    );
    sql.run(&format!("{grants}; alter role {role} bypassrls"));
    let ended = stage.check(&["--json"]).expect_code(0);
    Said::of(&ended).expect("rights on the table", "ok", &["reads"]);
    drop(sql);
    drop(stage);
    Cluster::shared(Pg::V18)
        .connect("postgres")
        .run(&format!("drop role {role}"));
}

#[test]
fn columns_that_are_added_later_leave_old_rows_as_what_they_are() {
    for pg in [Pg::V15, Pg::V18] {
        let (stage, sql) = stage_with_a_table(pg);
        init(&stage, &["--existing", "leave"]).expect_code(0);
        for column in ["column xid", "column created_at"] {
            let remedy = remedy(&stage, column);
            let statement = remedy
                .strip_prefix("when it suits: ")
                .and_then(|rest| rest.split(" (").next())
                .unwrap_or_else(|| panic!("{remedy}"));
            sql.run(statement.trim_end_matches(';'));
        }
        insert(&sql);
        let rows = format!(
            "select string_agg(format('%s %s', xid is null, created_at is null), ', ' \
             order by created_at nulls first) from {TABLE}"
        );
        assert_eq!(sql.one(&rows), "t t, f f");
        Said::of(&stage.check(&["--json"]).expect_code(0));
        let status = stage.status(&["--json"]);
        let said: serde_json::Value = serde_json::from_str(&status.stdout).expect("JSON");
        assert_eq!(said["waiting_rows"], 1, "{said:#}");
    }
}
