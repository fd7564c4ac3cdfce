//! The one table of what Postgres says: exit code and remedy by SQLSTATE, the text only to tell
//! two causes of one code apart (it differs by version and is translated on some servers, so that
//! every code also has an answer without it).

use super::{DbError, Exit, Failure};

/// Whom we spoke to, and as whom.
#[derive(Clone, Copy)]
pub struct Peer<'a> {
    /// `host "db.example" port 5432`; several, separated by commas.
    pub places: &'a str,
    pub user: &'a str,
    pub dbname: &'a str,
}

/// The end of a program that this error stops, for the connection it came from.
/// (`io::connect::failure` is the same for a configured database.)
#[must_use]
pub fn failure(error: &DbError, db: Peer<'_>) -> Failure {
    let (exit, remedy) = match error {
        DbError::Unreachable(text) => (
            Exit::Refused,
            format!("{}; `run` keeps trying by itself", unreachable(text, db)),
        ),
        DbError::Tls(text) => (Exit::Refused, tls(text)),
        DbError::Auth(text) => (Exit::Refused, auth(text, db)),
        DbError::Protocol(_) => (
            Exit::Refused,
            format!(
                "look whether {} is a Postgres server of version 15 or later, and no pooler",
                db.places
            ),
        ),
        DbError::Server {
            sqlstate,
            message,
            detail,
            hint,
        } => {
            let said = format!("{message} {}", detail.as_deref().unwrap_or_default());
            server(sqlstate, &said, hint.as_deref(), db)
        }
    };
    Failure::new(exit, error.to_string(), remedy).because(format!(
        "connecting as user \"{}\" to database \"{}\" at {}",
        db.user, db.dbname, db.places
    ))
}

fn server(sqlstate: &str, said: &str, hint: Option<&str>, db: Peer<'_>) -> (Exit, String) {
    let user = quoted(db.user);
    let remedy = match sqlstate {
        "28P01" => format!(
            "give the password of role {user} (in the database URL, PGPASSWORD or the password file), \
             or set it: alter role {user} password '…'"
        ),
        "28000" => not_admitted(said, db),
        "3D000" => format!(
            "correct the database's name (it is taken as it is written, capitals included), or: \
             create database {}",
            quoted(db.dbname)
        ),
        "42501" => not_permitted(said, &user, db),
        "55000" if said.contains("not currently accepting connections") => {
            format!(
                "alter database {} allow_connections true",
                quoted(db.dbname)
            )
        }
        "55000" => return not_in_state(said),
        // A server that takes a replication command for SQL was not asked for replication: a pooler
        // has swallowed the word.
        "08P01" | "42601"
            if ["startup parameter", "replication", "IDENTIFY_SYSTEM"]
                .iter()
                .any(|word| said.contains(word)) =>
        {
            "connect to Postgres itself: the pooler in between does not pass replication on \
             (PgBouncer does from 1.23 on, in session mode)"
                .to_owned()
        }
        // Statements that we prepared are another session's, or gone.
        "26000" | "42P05" | "08P01" => {
            "connect to Postgres itself, without a pooler or proxy in between".to_owned()
        }
        "53300" => "wait until a connection is free, or raise max_wal_senders and max_connections \
                    and restart the server"
            .to_owned(),
        "53400" => "drop a slot that nobody needs (select slot_name, active, \
                    pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) as retained_bytes from \
                    pg_replication_slots; select pg_drop_replication_slot('…')), or raise \
                    max_replication_slots and restart the server"
            .to_owned(),
        "42704" if said.contains("publication") => {
            "make the publication, as `walrelay init` does; when the stream already stands at \
             rows from before it was made, the slot must be made anew, too"
                .to_owned()
        }
        "42704" => "correct the name (--slot, --publication), or make what is missing with \
             `walrelay init`"
            .to_owned(),
        "42602" => {
            "a slot's name is 1 to 63 lower-case letters, digits and underscores: correct --slot"
                .to_owned()
        }
        "42710" => "choose another name, or drop what is there".to_owned(),
        "22023" if said.contains("parameter") => format!(
            "correct the setting: in options of the database URL or PGOPTIONS, or where it is the \
             role's or the database's default (alter role {user} reset …, alter database {} reset …)",
            quoted(db.dbname)
        ),
        "22023" => {
            "the slot was made for another output plugin than pgoutput: choose another --slot, \
                    or drop it and run `walrelay init`"
                .to_owned()
        }
        "0A000" => "connect to the primary, and to a server of version 15 or later".to_owned(),
        "25006" => "connect to the primary: this server is read-only".to_owned(),
        "55006" => "stop who holds the slot (select active_pid from pg_replication_slots; \
                    select pg_terminate_backend(…)); `run` waits for it by itself"
            .to_owned(),
        "57P03" => "wait until the server has started; `run` keeps trying by itself".to_owned(),
        "58P01" => "restart the server: its program files were upgraded under it".to_owned(),
        "55P03" => {
            "find who holds the lock (pg_locks, pg_stat_activity, pg_prepared_xacts) and end it, \
                    or try again"
                .to_owned()
        }
        _ => hint.map_or_else(
            || {
                format!(
                    "look up SQLSTATE {sqlstate} in the Postgres manual, and in the server's log"
                )
            },
            str::to_owned,
        ),
    };
    (Exit::Refused, remedy)
}

/// 28000: no line of `pg_hba.conf`, or a role that may not log in.
fn not_admitted(said: &str, db: Peer<'_>) -> String {
    let user = quoted(db.user);
    if said.contains("does not exist") {
        return format!(
            "correct the user's name, or: create role {user} login replication password '…'"
        );
    }
    if said.contains("not permitted to log in") {
        return format!("alter role {user} login");
    }
    if said.contains("Peer authentication") || said.contains("Ident authentication") {
        return format!(
            "run as the system user {user}, or add a line with scram-sha-256 to pg_hba.conf: \
             local {} {user} scram-sha-256",
            quoted(db.dbname)
        );
    }
    if said.contains("client certificate") {
        return "set sslcert and sslkey to a certificate and its key that the server's ssl_ca_file \
                vouches for (the usual ones are ~/.postgresql/postgresql.crt and .key)"
            .to_owned();
    }
    if said.contains("certificate authentication failed") {
        return format!(
            "show a certificate whose common name is {user} (sslcert, sslkey), or map its name to \
             the role in pg_ident.conf"
        );
    }
    let client = between(said, "host \"", "\"").unwrap_or("<address>");
    let (kind, address) = match client {
        "[local]" => ("local", String::new()),
        _ if said.contains("SSL encryption") => ("hostssl", mask(client)),
        _ => ("host", mask(client)),
    };
    let other_way = if kind == "host" && said.contains("no encryption") {
        "connect with TLS where a hostssl line admits this role (sslmode=require), or "
    } else {
        ""
    };
    format!(
        "{other_way}add to pg_hba.conf, above the lines that refuse, and reload \
         (select pg_reload_conf()): {kind} {} {user}{address} scram-sha-256 — with the database's \
         name: the keyword `replication` is for physical replication only",
        quoted(db.dbname)
    )
}

fn mask(client: &str) -> String {
    let bits = if client.contains(':') { 128 } else { 32 };
    format!(" {client}/{bits}")
}

fn not_permitted(said: &str, user: &str, db: Peer<'_>) -> String {
    if said.contains("permission denied for database") {
        return format!("grant connect on database {} to {user}", quoted(db.dbname));
    }
    if said.contains("output plugin") {
        return "add pgoutput to output_plugin_libraries and reload the server".to_owned();
    }
    if said.contains("replication") || said.contains("WAL sender") {
        return format!(
            "alter role {user} replication (Amazon RDS: grant rds_replication to {user})"
        );
    }
    if said.contains("row-level security") {
        return format!("alter role {user} bypassrls, or disable row level security on the table");
    }
    format!(
        "grant role {user} what is missing (`walrelay init --print-sql` prints the grants), or \
         connect as the owner; for the stream: alter role {user} replication"
    )
}

/// 55000: the server or the slot is not in the state that this needs.
fn not_in_state(said: &str) -> (Exit, String) {
    if said.contains("wal_level") {
        return (
            Exit::Refused,
            "alter system set wal_level = logical; and restart the server (Amazon RDS and Aurora: \
             rds.logical_replication = 1 in the parameter group; Google Cloud SQL: \
             cloudsql.logical_decoding = on; Azure: wal_level = logical under server parameters)"
                .to_owned(),
        );
    }
    if said.contains("not created in this database") {
        return (
            Exit::Refused,
            "connect to the slot's database (select slot_name, database from \
             pg_replication_slots), or choose another --slot"
                .to_owned(),
        );
    }
    if said.contains("physical") {
        return (
            Exit::Refused,
            "the slot is for physical replication: choose another --slot".to_owned(),
        );
    }
    if said.contains("being synchronized") {
        return (
            Exit::Refused,
            "connect to the primary: on a standby the slot is only a copy".to_owned(),
        );
    }
    if said.contains("invalidated") || said.contains("can no longer") {
        return (
            Exit::Halted,
            "the slot is lost, and what it had not delivered is only in the table: drop it and \
             decide with `walrelay init` what becomes of those rows"
                .to_owned(),
        );
    }
    (
        Exit::Refused,
        "look at the slot (select * from pg_replication_slots) and at the server's log".to_owned(),
    )
}

/// The four ways of not being there, told apart by the words of `io::connect`.
fn unreachable(text: &str, db: Peer<'_>) -> String {
    let remedy = if text.contains("none of the hosts is the primary") {
        "start or promote the primary, or add it to the list (now {})"
    } else if text.contains("cannot resolve") || text.contains("resolving") {
        "correct the host's name (now {}), or look at this machine's resolver (/etc/resolv.conf)"
    } else if text.contains("timed out") {
        "correct host and port (now {}), or look for a firewall in between that drops packets and \
         for a server that hangs"
    } else {
        "start the server, or correct where it is (now {})"
    };
    remedy.replace("{}", db.places)
}

fn tls(text: &str) -> String {
    let remedy = if text.contains("sslnegotiation=direct") {
        "leave sslnegotiation out: TLS from the first byte is spoken by Postgres 17 and later"
    } else if text.contains("offers no TLS") {
        "switch TLS on at the server (ssl = on), or allow plain text: sslmode=prefer or disable"
    } else if text.contains("name mismatch") {
        "connect by a name that the certificate is for, or have the server's certificate made for \
         this one"
    } else if text.contains("unknown authority") {
        "set sslrootcert to the certificate of the authority that signed the server's"
    } else if text.contains("sslrootcert") {
        "set sslrootcert to a readable file with certificates in PEM form, or to system; to leave \
         the server's certificate unlooked at: sslmode=require"
    } else if text.contains("sslpassword") {
        "give the password of the key in sslpassword, or a key that is not encrypted"
    } else if text.contains("may use it") {
        "chmod 0600 the file of sslkey"
    } else if text.contains("sslkey") || text.contains("sslcert") || text.contains("sslcrl") {
        "name a readable file in PEM form, the key being the certificate's own"
    } else if text.contains("refuses our side") {
        "set sslcert and sslkey to a certificate that the server's ssl_ca_file vouches for and that \
         has not expired, and look at the server's log"
    } else if text.contains("refused") {
        "have the server's certificate renewed, or look at both machines' clocks"
    } else {
        "look at the server's log, and at its ssl_* settings; TLS 1.2 is the least that is spoken"
    };
    remedy.to_owned()
}

fn auth(text: &str, db: Peer<'_>) -> String {
    if text.contains("is ignored") {
        return "chmod 0600 the password file, or give the password in PGPASSWORD".to_owned();
    }
    if text.contains("require_auth") {
        return "let pg_hba.conf ask this role for a method that require_auth allows, or change \
                require_auth"
            .to_owned();
    }
    if text.contains("channel_binding") {
        return "let pg_hba.conf ask this role for scram-sha-256 and connect over TLS \
                (sslmode=require or better), or set channel_binding=prefer"
            .to_owned();
    }
    if text.contains("clear text") {
        return "set sslmode=require, or let pg_hba.conf ask this role for scram-sha-256; where the \
                network may know the password: require_auth=password"
            .to_owned();
    }
    if text.contains("no password") {
        return format!(
            "give the password of role {} in PGPASSWORD, a password file (PGPASSFILE) or the \
             database URL",
            quoted(db.user)
        );
    }
    "let pg_hba.conf ask this role for scram-sha-256".to_owned()
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    Some(rest.split_once(after)?.0)
}

/// As SQL and `pg_hba.conf` take a name.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Peer<'static> = Peer {
        places: "host \"db.example\" port 5432",
        user: "walrelay",
        dbname: "app",
    };

    fn said(sqlstate: &str, message: &str) -> Failure {
        let error = DbError::Server {
            sqlstate: sqlstate.to_owned(),
            message: message.to_owned(),
            detail: None,
            hint: None,
        };
        let failure = failure(&error, PEER);
        let text = failure.to_string();
        assert!(text.contains(sqlstate) && text.contains(message), "{text}");
        failure
    }

    #[test]
    fn a_role_without_replication_is_told_the_statement() {
        for message in [
            "must be superuser or replication role to start walsender",
            "permission denied to start WAL sender",
        ] {
            let remedy = said("42501", message).remedy;
            assert!(
                remedy.contains("alter role \"walrelay\" replication"),
                "{remedy}"
            );
        }
    }

    #[test]
    fn a_missing_pg_hba_line_is_printed_with_the_database() {
        let remedy = said(
            "28000",
            "no pg_hba.conf entry for host \"127.0.0.1\", user \"walrelay\", database \"app\", no encryption",
        )
        .remedy;
        assert!(
            remedy.contains("host \"app\" \"walrelay\" 127.0.0.1/32 scram-sha-256"),
            "{remedy}"
        );
        assert!(remedy.contains("physical replication only"), "{remedy}");
        let remedy = said(
            "28000",
            "no pg_hba.conf entry for host \"[local]\", user \"walrelay\", database \"app\", no encryption",
        )
        .remedy;
        assert!(
            remedy.contains("local \"app\" \"walrelay\" scram-sha-256"),
            "{remedy}"
        );
    }

    /// Case C13.
    #[test]
    fn what_is_not_there_is_told_apart() {
        let remedy = |text: &str| failure(&DbError::Unreachable(text.to_owned()), PEER).remedy;
        for (text, word) in [
            (
                "cannot connect to x: 10.0.0.1 refused the connection",
                "start the server",
            ),
            ("cannot resolve the host name \"db\": unknown", "resolver"),
            (
                "cannot connect to x: 10.0.0.1 timed out after 2 s without an answer",
                "firewall",
            ),
            (
                "none of the hosts is the primary: x is a standby",
                "promote",
            ),
        ] {
            let remedy = remedy(text);
            assert!(
                remedy.contains(word) && remedy.contains("db.example"),
                "{remedy}"
            );
            assert!(remedy.contains("keeps trying"), "{remedy}");
        }
    }

    #[test]
    fn a_pooler_is_recognised_and_is_definite() {
        let failure = said("08P01", "unsupported startup parameter: replication");
        assert!(failure.remedy.contains("PgBouncer"), "{failure}");
        let swallowed = said("42601", "syntax error at or near \"IDENTIFY_SYSTEM\"");
        assert!(swallowed.remedy.contains("PgBouncer"), "{swallowed}");
        let setting = said("22023", "invalid value for parameter \"work_mem\": \"x\"");
        assert!(setting.remedy.contains("PGOPTIONS"), "{setting}");
        let error = DbError::Server {
            sqlstate: "08P01".to_owned(),
            message: String::new(),
            detail: None,
            hint: None,
        };
        assert!(!error.heals_with_time());
    }

    #[test]
    fn wal_level_and_a_lost_slot_share_a_code_but_not_an_exit() {
        let level = said("55000", "logical decoding requires wal_level >= logical");
        assert_eq!(level.exit, Exit::Refused);
        assert!(
            level
                .remedy
                .contains("alter system set wal_level = logical")
        );
        let lost = said("55000", "can no longer access replication slot \"l1\"");
        assert_eq!(lost.exit, Exit::Halted);
    }

    #[test]
    fn a_code_without_an_entry_still_has_a_remedy() {
        assert!(
            said("XX000", "unrecognized option")
                .remedy
                .contains("XX000")
        );
    }
}
