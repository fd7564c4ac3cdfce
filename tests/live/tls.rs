//! TLS and log-in, with real certificates on a real server: what each setting lets through, and what
//! a refusal says.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use crate::certs::{Authority, chmod};
use crate::postgres::{Cluster, Pg};
use crate::proc::{self, eventually_says};
use crate::relay::{Ended, run_to_end};
use crate::stage::MINUTE;

const PASSWORD: &str = "s3cr3t";

/// A server with TLS, and a role for each way in.
struct Secure {
    cluster: Cluster,
    ca: Authority,
    stranger: Authority,
}

impl Secure {
    fn start(pg: Pg) -> Secure {
        let ca = Authority::new("right");
        let cluster = Cluster::with(pg, &["listen_addresses = '127.0.0.1, 127.0.0.2'"]);
        let sql = cluster.connect("postgres");
        sql.run(&format!(
            "create role over_tls login superuser password '{PASSWORD}';
             create role over_plain login superuser password '{PASSWORD}';
             create role clear login superuser password '{PASSWORD}';
             create role certified login superuser;
             set password_encryption = 'md5';
             create role hashed login superuser password '{PASSWORD}'"
        ));
        let signed = ca.sign("localhost", &["localhost", "127.0.0.1"]);
        cluster.put("server.crt", &signed.certificate());
        cluster.put("server.key", &signed.key());
        cluster.put("ca.crt", &std::fs::read(&ca.file).expect("it was written"));
        cluster.configure(&["ssl_ca_file = 'ca.crt'", "ssl = on"]);
        cluster.hba(&[
            "local all all trust",
            "hostssl all over_tls 127.0.0.0/8 scram-sha-256",
            "hostnossl all over_plain 127.0.0.0/8 scram-sha-256",
            "host all clear 127.0.0.0/8 password",
            "host all hashed 127.0.0.0/8 md5",
            "hostssl all certified 127.0.0.0/8 cert",
            "host all postgres 127.0.0.0/8 trust",
        ]);
        eventually_says(
            MINUTE,
            || "TLS is on".to_owned(),
            || (sql.one("show ssl") == "on").then_some(()),
        );
        Secure {
            cluster,
            ca,
            stranger: Authority::new("wrong"),
        }
    }

    /// Shared: its certificates are not changed.
    fn shared() -> &'static Secure {
        static SHARED: OnceLock<Secure> = OnceLock::new();
        SHARED.get_or_init(|| Secure::start(Pg::V18))
    }

    /// `init`, without making anything: its first word to the server is the log-in.
    fn init(&self, settings: &[(&str, &str)]) -> Ended {
        self.command(&["init", "--print-sql"], settings)
    }

    fn command(&self, args: &[&str], settings: &[(&str, &str)]) -> Ended {
        let port = self.cluster.port.to_string();
        let mut env = vec![
            ("PGHOST", "localhost"),
            ("PGPORT", &port),
            ("PGDATABASE", "postgres"),
            ("PGPASSWORD", PASSWORD),
            ("HOME", "/nonexistent"),
        ];
        // What is no variable is a word of the connection string.
        let mut words = Vec::new();
        for (name, value) in settings {
            if name.starts_with(char::is_uppercase) {
                env.push((name, value));
            } else {
                words.push(format!("{name}='{value}'"));
            }
        }
        let words = words.join(" ");
        if !words.is_empty() {
            env.push(("WALRELAY_DATABASE_URL", &words));
        }
        let ended = run_to_end(args, &env, MINUTE);
        let printed = ended.stdout.contains(PASSWORD) || ended.stderr.contains(PASSWORD);
        assert!(!printed, "the password is printed: {}", ended.stderr);
        ended
    }

    #[track_caller]
    fn admits(&self, settings: &[(&str, &str)]) {
        let ended = self.init(settings);
        assert_eq!(ended.code, 0, "{settings:?}: {}", ended.stderr);
    }

    /// By `init` and by `run`, in the same words.
    #[track_caller]
    fn refuses(&self, settings: &[(&str, &str)], words: &[&str]) {
        let run = ["run", "--brokers", "127.0.0.1:1"];
        for ended in [self.init(settings), self.command(&run, settings)] {
            assert_eq!(ended.code, 3, "{settings:?}: {}", ended.stderr);
            let said = ended.stderr.replace("\\\"", "\"");
            for word in words {
                assert!(
                    said.contains(word),
                    "{settings:?}: {word:?} is not in: {said}"
                );
            }
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("our paths are UTF-8")
}

/// Case C08.
#[test]
fn each_check_of_the_servers_certificate_says_that_it_failed() {
    let server = Secure::shared();
    let (right, wrong) = (text(&server.ca.file), text(&server.stranger.file));
    let with = |host, mode, root| {
        [
            ("PGUSER", "over_tls"),
            ("PGHOST", host),
            ("PGSSLMODE", mode),
            ("PGSSLROOTCERT", root),
        ]
    };
    server.admits(&with("localhost", "verify-full", right));
    server.admits(&with("127.0.0.1", "verify-full", right));
    server.admits(&with("127.0.0.2", "verify-ca", right));
    server.admits(&with("127.0.0.2", "require", right));
    server.admits(
        &[
            &with("localhost", "verify-full", right)[..],
            &[("PGHOSTADDR", "127.0.0.2")],
        ]
        .concat(),
    );
    server.admits(&with("localhost", "require", "")[..3]);
    server.refuses(
        &with("127.0.0.2", "verify-full", right),
        &["name mismatch", "127.0.0.2", "localhost, 127.0.0.1"],
    );
    for mode in ["require", "verify-ca", "verify-full"] {
        let unknown = with("localhost", mode, wrong);
        server.refuses(&unknown, &["unknown authority", "set sslrootcert"]);
    }
    // Without TLS, then, and there this role is not let in: both halves of the reason are told.
    server.refuses(
        &with("localhost", "prefer", wrong),
        &["28000", "no encryption", "unknown authority"],
    );
    server.refuses(
        &with("localhost", "verify-full", "/no/such.crt"),
        &["sslrootcert /no/such.crt"],
    );
    server.refuses(
        &with("localhost", "verify-full", "system"),
        &["unknown authority"],
    );
}

#[test]
fn a_root_certificate_in_its_usual_place_makes_require_a_check() {
    let server = Secure::shared();
    for (ca, is_admitted) in [(&server.ca, true), (&server.stranger, false)] {
        let home = proc::dir("home");
        std::fs::create_dir(home.join(".postgresql")).expect("the directory is ours");
        std::fs::copy(&ca.file, home.join(".postgresql/root.crt")).expect("it can be copied");
        let settings = [
            ("PGUSER", "over_tls"),
            ("PGSSLMODE", "require"),
            ("HOME", text(&home)),
        ];
        if is_admitted {
            server.admits(&settings);
        } else {
            server.refuses(&settings, &["unknown authority"]);
        }
    }
}

#[test]
fn an_expired_certificate_is_refused_and_a_renewed_one_taken() {
    let server = Secure::start(Pg::V15);
    let settings = [
        ("PGUSER", "over_tls"),
        ("PGSSLMODE", "verify-ca"),
        ("PGSSLROOTCERT", text(&server.ca.file)),
    ];
    server.admits(&settings);
    let serve = |signed: &crate::certs::Signed, code: i32| {
        server.cluster.put("server.crt", &signed.certificate());
        server.cluster.put("server.key", &signed.key());
        server.cluster.reload();
        let said = std::cell::RefCell::new(String::new());
        eventually_says(
            MINUTE,
            || said.borrow().clone(),
            || {
                let ended = server.init(&settings);
                *said.borrow_mut() = ended.stderr;
                (ended.code == code).then_some(())
            },
        );
    };
    serve(&server.ca.sign_expired("localhost", &["localhost"]), 3);
    server.refuses(&settings, &["expired", "renewed"]);
    // A file that was named must be there.
    let no_crl = [&settings[..], &[("PGSSLCRL", "/no/such.crl")]].concat();
    server.refuses(&no_crl, &["sslcrl /no/such.crl"]);
    // No check of a certificate, no complaint.
    server.admits(&[("PGUSER", "over_tls"), ("PGSSLMODE", "require")]);
    serve(&server.ca.sign("localhost", &["localhost"]), 0);
    // TLS from the first byte is news to this version.
    let direct = [
        ("sslmode", "require"),
        ("sslnegotiation", "direct"),
        ("user", "over_tls"),
    ];
    server.refuses(&direct, &["sslnegotiation=direct", "17"]);
}

#[test]
fn a_certificate_that_was_taken_back_is_refused() {
    let server = Secure::shared();
    let signed = std::fs::read(server.cluster.data().join("server.crt")).expect("it was put");
    let crl = server.ca.revoke(&signed);
    let none = server
        .ca
        .revoke(&server.ca.sign("other", &[]).certificate());
    let base = [
        ("user", "over_tls"),
        ("sslmode", "verify-full"),
        ("sslrootcert", text(&server.ca.file)),
    ];
    server.refuses(
        &[&base[..], &[("sslcrl", text(&crl))]].concat(),
        &["revoked"],
    );
    server.admits(&[&base[..], &[("sslcrl", text(&none))]].concat());
}

#[test]
fn a_client_certificate_is_shown_where_it_is_asked_for() {
    let server = Secure::shared();
    let signed = server.ca.sign("certified", &[]);
    let cert = server.ca.put("client.crt", &signed.certificate());
    let key = server.ca.put("client.key", &signed.key());
    let locked = server.ca.put("locked.key", &signed.locked_key("opens it"));
    let base = [("user", "certified"), ("sslmode", "require")];
    let admits = |words: &[(&str, &str)]| server.admits(&[&base[..], words].concat());
    let refuses = |words: &[(&str, &str)], said: &[&str]| {
        server.refuses(&[&base[..], words].concat(), said);
    };
    admits(&[("sslcert", text(&cert)), ("sslkey", text(&key))]);
    admits(&[
        ("sslcert", text(&cert)),
        ("sslkey", text(&locked)),
        ("sslpassword", "opens it"),
    ]);
    refuses(&[], &["28000", "valid client certificate", "sslcert"]);
    refuses(
        &[("sslcert", text(&cert)), ("sslkey", text(&locked))],
        &["sslpassword is missing"],
    );
    refuses(
        &[
            ("sslcert", text(&cert)),
            ("sslkey", text(&locked)),
            ("sslpassword", "no"),
        ],
        &["sslpassword does not open it"],
    );
    refuses(
        &[("sslcert", text(&cert)), ("sslkey", "/no/such.key")],
        &["sslkey /no/such.key"],
    );
    let open = server.ca.put("open.key", &signed.key());
    chmod(&open, 0o644);
    refuses(
        &[("sslcert", text(&cert)), ("sslkey", text(&open))],
        &["0600", "chmod"],
    );
    let other = server.ca.sign("somebody", &[]);
    let other_cert = server.ca.put("other.crt", &other.certificate());
    let other_key = server.ca.put("other.key", &other.key());
    refuses(
        &[("sslcert", text(&other_cert)), ("sslkey", text(&other_key))],
        &["28000", "common name is \"certified\""],
    );
    refuses(
        &[("sslcert", text(&cert)), ("sslkey", text(&other_key))],
        &["does not belong"],
    );
    let foreign = server.stranger.sign("certified", &[]);
    let foreign_cert = server.stranger.put("client.crt", &foreign.certificate());
    let foreign_key = server.stranger.put("client.key", &foreign.key());
    // The server's refusal races with what we send: each time it must be told.
    for _ in 0..6 {
        refuses(
            &[
                ("sslcert", text(&foreign_cert)),
                ("sslkey", text(&foreign_key)),
            ],
            &["unknown ca", "ssl_ca_file"],
        );
    }
}

#[test]
fn allow_and_prefer_try_the_other_way() {
    let server = Secure::shared();
    server.admits(&[("PGUSER", "over_tls"), ("PGSSLMODE", "allow")]);
    server.admits(&[("PGUSER", "over_plain"), ("PGSSLMODE", "prefer")]);
    server.admits(&[("PGUSER", "over_plain"), ("PGSSLMODE", "allow")]);
    server.admits(&[("PGUSER", "clear"), ("PGSSLMODE", "allow")]);
    server.refuses(
        &[("PGUSER", "over_plain"), ("PGSSLMODE", "require")],
        &["28000", "SSL encryption"],
    );
    server.refuses(
        &[("PGUSER", "over_tls"), ("PGSSLMODE", "disable")],
        &["28000", "no encryption", "hostssl"],
    );
    server.admits(&[
        ("user", "over_tls"),
        ("sslmode", "require"),
        ("sslnegotiation", "direct"),
    ]);
    server.refuses(
        &[
            ("user", "over_tls"),
            ("sslmode", "require"),
            ("ssl_min_protocol_version", "TLSv1"),
            ("ssl_max_protocol_version", "TLSv1.1"),
        ],
        &["handshake failed"],
    );
}

/// Case C08.
#[test]
fn a_server_without_tls_is_refused_where_tls_is_asked_for() {
    let port = Cluster::shared(Pg::V18).port.to_string();
    for mode in ["disable", "allow", "prefer", "require"] {
        let env = [
            ("PGHOST", "127.0.0.1"),
            ("PGPORT", port.as_str()),
            ("PGUSER", "postgres"),
            ("PGDATABASE", "postgres"),
            ("PGSSLMODE", mode),
        ];
        let ended = run_to_end(&["init", "--print-sql"], &env, MINUTE);
        if mode == "require" {
            assert_eq!(ended.code, 3, "{}", ended.stderr);
            assert!(ended.stderr.contains("offers no TLS"), "{}", ended.stderr);
        } else {
            assert_eq!(ended.code, 0, "{mode}: {}", ended.stderr);
        }
    }
}

#[test]
fn channel_binding_and_require_auth_hold_on_both_connections() {
    let server = Secure::shared();
    let with = |user: &'static str, mode: &'static str, word: &'static str, value: &'static str| {
        [("user", user), ("sslmode", mode), (word, value)]
    };
    server.admits(&with("over_tls", "require", "channel_binding", "require"));
    server.admits(&with("over_tls", "require", "channel_binding", "disable"));
    server.refuses(
        &with("over_plain", "disable", "channel_binding", "require"),
        &["channel_binding=require", "without TLS", "sslmode=require"],
    );
    server.refuses(
        &with("hashed", "require", "channel_binding", "require"),
        &["md5", "channel_binding=require"],
    );
    server.admits(&with("hashed", "require", "require_auth", "md5"));
    server.refuses(
        &with("hashed", "require", "require_auth", "scram-sha-256"),
        &["md5", "require_auth=scram-sha-256 forbids it"],
    );
    server.refuses(
        &with("postgres", "require", "require_auth", "!none"),
        &["without asking who we are"],
    );
}

#[test]
fn a_password_crosses_a_network_in_clear_only_when_asked_for() {
    let server = Secure::shared();
    server.admits(&[("user", "clear"), ("sslmode", "require")]);
    server.refuses(
        &[("user", "clear"), ("sslmode", "disable")],
        &["clear text", "sslmode=require", "require_auth=password"],
    );
    server.admits(&[
        ("user", "clear"),
        ("sslmode", "disable"),
        ("require_auth", "password"),
    ]);
    // The wrong one is refused by the server, at once.
    let started = std::time::Instant::now();
    server.refuses(
        &[
            ("user", "over_tls"),
            ("sslmode", "require"),
            ("password", "no"),
        ],
        &["28P01", "over_tls"],
    );
    assert!(started.elapsed() < Duration::from_secs(10));
}
