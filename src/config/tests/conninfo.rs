//! Connection strings.

use std::path::PathBuf;
use std::time::Duration;

use super::super::{
    ChannelBinding, Database, Method, Negotiation, Pem, Root, RunConfig, SslMode, Target, Tcp, Tls,
};
use super::{around, database, file, path, refused_in, run, run_in, url_refused};

#[test]
fn a_url_with_everything() {
    let database = database(
        "postgresql://u%40x:p%40ss@db.example:6432/App-DB?sslmode=verify-full\
         &sslrootcert=%2Fca.pem&application_name=r&connect_timeout=7&options=-c%20a%3Db",
    );
    assert_eq!(
        database,
        Database {
            password: Some("p@ss".to_owned()),
            tls: Tls {
                sslmode: SslMode::VerifyFull,
                root: Root::File(Pem::Named(PathBuf::from("/ca.pem"))),
                ..Tls::default()
            },
            options: Some("-c a=b".to_owned()),
            application_name: "r".to_owned(),
            connect_timeout: Duration::from_secs(7),
            ..Database::plain("db.example", 6432, "u@x", "App-DB")
        }
    );
}

/// Case C09.
#[test]
fn sockets_and_ipv6() {
    let place = |url: &str| {
        let database = database(url);
        let host = &database.hosts[0];
        (host.name.clone(), host.port, database.user, database.dbname)
    };
    let expected =
        |host: &str, user: &str| (host.to_owned(), 5432, user.to_owned(), "app".to_owned());
    let socket = expected("/var/run/postgresql", "u");
    assert_eq!(
        place("postgresql://u@%2Fvar%2Frun%2Fpostgresql:5432/app"),
        socket
    );
    assert_eq!(
        place("postgresql:///app?host=/var/run/postgresql&user=u"),
        socket
    );
    assert_eq!(place("host=/var/run/postgresql user=u dbname=app"), socket);
    assert_eq!(place("postgres://u@[::1]:5432/app"), expected("::1", "u"));
    assert_eq!(
        place("postgres://[fe80::1]/app"),
        expected("fe80::1", "ops")
    );
    assert_eq!(
        place("postgres:///app"),
        expected("/var/run/postgresql", "ops")
    );
    assert_eq!(place("postgres://h/App-DB").3, "App-DB");
    assert_eq!(place("postgres://u@h").3, "u");
}

#[test]
fn without_a_socket_directory_the_host_is_localhost() {
    let mut around = around(&[]);
    around.socket_dir = None;
    let config = run_in(&around, &[]).expect("right");
    assert_eq!(config.source.database.hosts[0].name, "localhost");
    assert_eq!(config.source.database.tls.sslmode, SslMode::Prefer);
}

const PASSWORD: &str = "p@ss:w/rd#1%?é ";

/// Case C06.
#[test]
fn a_hard_password_arrives_whole() {
    let password = |config: RunConfig| config.source.database.password;
    let expected = Some(PASSWORD.to_owned());
    let url = "postgresql://u:p%40ss%3Aw%2Frd%231%25%3F%C3%A9%20@h/app";
    assert_eq!(password(run(&["--database-url", url])), expected);
    let words = format!("host=h password='{PASSWORD}' dbname=app");
    assert_eq!(password(run(&["--database-url", &words])), expected);
    let env = around(&[("PGPASSWORD", PASSWORD)]);
    assert_eq!(password(run_in(&env, &[]).expect("right")), expected);
}

/// Case C06.
#[test]
fn a_password_pasted_raw_is_refused_and_masked() {
    let url = format!("postgresql://u:{PASSWORD}@h/app");
    let text = url_refused(
        &url,
        &["percent-encode @ : / # % ? in the password", "u:***"],
    );
    assert!(!text.contains("ss:w") && !text.contains("rd#1"), "{text}");
    for raw in [
        "se@cret",
        "se/cret",
        "se#cret",
        "se%cret",
        "se?cret",
        "12/cret",
        "12?cret",
        "%zzcret",
        "cret%",
        "12?password=cret",
        "12?a=cret",
        "12?pass",
        "p?host=cret",
        "12/a?host=cret",
    ] {
        for hosts in ["db", "db:1,other:2"] {
            let text = url_refused(
                &format!("postgresql://u:{raw}@{hosts}/app"),
                &["percent-encode @ : / # % ? in the password", "***"],
            );
            assert!(
                !text.contains("cret") && !text.contains("12"),
                "{raw}: {text}"
            );
        }
    }
}

#[test]
fn a_mask_covers_every_place_of_a_password() {
    for url in [
        "postgres://h:5432/a?user=u&password=p@secret&x#",
        "postgres://h/a?password=secret#",
        "postgres://h/a?p%61ssword=secret#",
        "postgres://user:secret/a",
        "postgres://h:5432/a?password=secret",
        "postgres://u:pw@h:x/a?password=secret",
        "postgres://u:secret@h:x/a?user=x@y",
    ] {
        if let Err(failure) = run_in(&around(&[]), &["--database-url", url]) {
            assert!(!failure.to_string().contains("secret"), "{failure}");
        }
    }
    let text = url_refused("postgres://u:pw@h:x/a", &["postgres://u:***@h:x/a"]);
    assert!(!text.contains("pw"), "{text}");
}

#[test]
fn debug_masks_the_passwords() {
    let args = [
        "--database-url",
        "postgres://u:secret@h/a?sslpassword=secret",
        "--kafka",
        "sasl.password=secret",
    ];
    let text = format!("{:?}", run(&args));
    assert!(!text.contains("secret"), "{text}");
    assert!(text.contains("sasl.password"), "{text}");
}

#[test]
fn keyword_strings_have_quotes_and_backslashes() {
    let database = database(r"  host = 'a b' user=it\'s password='x\'y\\z' dbname='' port=6000 ");
    assert_eq!(database.hosts[0].name, "a b");
    assert_eq!(database.user, "it's");
    assert_eq!(database.password.as_deref(), Some(r"x'y\z"));
    assert_eq!(database.dbname, "it's");
    assert_eq!(database.hosts[0].port, 6000);
    for bad in [
        "app",
        "host=h password='secret",
        "host=h secret",
        "user",
        r"host=a\",
    ] {
        let text = url_refused(bad, &["--database-url", "write postgresql://"]);
        assert!(!text.contains("secret"), "{text}");
    }
    let text = url_refused("host=h password=two secret=x", &["libpq"]);
    assert!(!text.contains("two"), "{text}");
}

#[test]
fn pg_variables_stand_beneath_the_string() {
    let env = around(&[
        ("PGHOST", "envhost"),
        ("PGPORT", "6000"),
        ("PGUSER", "envuser"),
        ("PGPASSWORD", "envpass"),
        ("PGDATABASE", "envdb"),
        ("PGSSLMODE", "require"),
        ("PGAPPNAME", "envapp"),
        ("PGCONNECT_TIMEOUT", "1"),
    ]);
    let database = run_in(&env, &[]).expect("right").source.database;
    assert_eq!(database.hosts[0].name, "envhost");
    assert_eq!(database.hosts[0].port, 6000);
    assert_eq!(database.user, "envuser");
    assert_eq!(database.password.as_deref(), Some("envpass"));
    assert_eq!(database.dbname, "envdb");
    assert_eq!(database.tls.sslmode, SslMode::Require);
    assert_eq!(database.application_name, "envapp");
    assert_eq!(database.connect_timeout, Duration::from_secs(2));
    let args = ["--database-url", "postgres://u@h/a?sslmode=disable"];
    let database = run_in(&env, &args).expect("right").source.database;
    assert_eq!(places(&database), ["h:6000"]);
    assert_eq!(database.user, "u");
    assert_eq!(database.tls.sslmode, SslMode::Disable);
    let empty = around(&[("PGHOST", ""), ("PGPORT", "")]);
    let database = run_in(&empty, &[]).expect("right").source.database;
    assert_eq!(database.hosts[0].port, 5432);
}

fn places(database: &Database) -> Vec<String> {
    let hosts = database.hosts.iter();
    hosts.map(|h| format!("{}:{}", h.name, h.port)).collect()
}

/// Case C05.
#[test]
fn several_hosts_go_with_one_port_or_with_one_each() {
    for (written, expected) in [
        ("postgres://a,b/x", ["a:5432", "b:5432"]),
        ("postgres://u:p@a:1,b:2/x", ["a:1", "b:2"]),
        ("postgres://[::1]:1,b/x", ["::1:1", "b:5432"]),
        ("postgres:///x?host=a,b&port=7", ["a:7", "b:7"]),
        ("host=a,b port=1,2", ["a:1", "b:2"]),
        ("host=a,/tmp port=,2", ["a:5432", "/tmp:2"]),
        ("host=a,", ["a:5432", "/var/run/postgresql:5432"]),
    ] {
        assert_eq!(places(&database(written)), expected, "{written}");
    }
    let env = around(&[("PGHOST", "a,b"), ("PGPORT", "1,2")]);
    let found = run_in(&env, &[]).expect("right").source.database;
    assert_eq!(places(&found), ["a:1", "b:2"]);
    url_refused("host=a,b,c port=1,2", &["2 entries for 3 hosts"]);
    url_refused("host=a port=1,2", &["one for each"]);
    url_refused("host=a,b port=1,x", &["\"x\" is no port"]);
    url_refused("postgres://a:1,b:x/d", &["port"]);
}

#[test]
fn an_address_stands_in_for_the_resolver() {
    let found = database("host=db.example,b hostaddr=10.0.0.1,::1");
    assert_eq!(places(&found), ["db.example:5432", "b:5432"]);
    assert_eq!(found.hosts[0].address, "10.0.0.1".parse().ok());
    assert_eq!(found.hosts[1].address, "::1".parse().ok());
    let alone = database("hostaddr=127.0.0.1 port=7");
    assert_eq!(places(&alone), ["127.0.0.1:7"]);
    url_refused("host=a,b hostaddr=127.0.0.1", &["2 entries", "has 1"]);
    url_refused("hostaddr=localhost", &["no address", "names go into host"]);
}

#[test]
fn only_the_primary_can_be_asked_for() {
    let target = |word: &str| database(&format!("host=a target_session_attrs={word}")).target;
    assert_eq!(target("any"), Target::Primary);
    assert_eq!(target("primary"), Target::Primary);
    assert_eq!(target("read-write"), Target::ReadWrite);
    for word in ["standby", "read-only", "prefer-standby"] {
        let text = format!("host=a target_session_attrs={word}");
        url_refused(&text, &["target_session_attrs", "needs the primary"]);
    }
    let env = around(&[("PGTARGETSESSIONATTRS", "primry")]);
    refused_in(&env, &[], &["PGTARGETSESSIONATTRS", "not known"]);
}

#[test]
fn words_without_effect_are_taken_and_words_that_cannot_be_honoured_are_refused() {
    for word in [
        "gssencmode=disable",
        "gssencmode=prefer",
        "krbsrvname=postgres",
        "sslcompression=0",
        "client_encoding=auto",
        "load_balance_hosts=random",
        "max_protocol_version=latest",
        "sslcertmode=allow",
        "fallback_application_name=x",
    ] {
        assert_eq!(database(&format!("host=h {word}")).hosts[0].name, "h");
    }
    for word in [
        "replication=database",
        "gssencmode=require",
        "sslkeylogfile=/x",
        "scram_client_key=x",
        "requirepeer=postgres",
        "sslcertmode=require",
        "min_protocol_version=3.2",
        "oauth_issuer=x",
    ] {
        let key = word.split('=').next().unwrap_or_default();
        url_refused(&format!("host=h {word}"), &[key, "cannot be honoured"]);
        url_refused(&format!("postgres://h/a?{word}"), &[key]);
    }
    let env = around(&[("PGREQUIREPEER", "postgres")]);
    refused_in(&env, &["--database-url", "host=h"], &["PGREQUIREPEER"]);
    let env = around(&[("PGGSSENCMODE", "require")]);
    refused_in(&env, &[], &["PGGSSENCMODE", "gssencmode=disable"]);
}

#[test]
fn methods_of_authentication_are_allowed_or_forbidden() {
    let methods = |word: &str| {
        let auth = database(&format!("host=h require_auth={word}")).auth;
        auth.methods.expect("it was given")
    };
    let one = methods("scram-sha-256");
    assert_eq!(one.allowed, [Method::ScramSha256]);
    assert!(!one.clear_password);
    assert!(methods("password,md5").clear_password);
    let others = methods("!password,!none");
    assert_eq!(others.allowed, [Method::Md5, Method::ScramSha256]);
    // Not asked for by name: it stays off a network without TLS.
    assert!(!methods("!md5").clear_password);
    for bad in [
        "password,!md5",
        "scram",
        "gss",
        "!none,!password,!md5,!scram-sha-256",
    ] {
        url_refused(&format!("host=h require_auth={bad}"), &["require_auth"]);
    }
    let bound = database("host=h channel_binding=require").auth;
    assert_eq!(bound.channel_binding, ChannelBinding::Require);
    url_refused("host=h channel_binding=yes", &["disable, prefer, require"]);
}

#[test]
fn keepalives_are_the_operators_to_set_and_0_is_the_kernels() {
    let tcp = database("host=h keepalives_idle=7 keepalives_count=0 tcp_user_timeout=9").tcp;
    assert_eq!(tcp.idle, Some(Duration::from_secs(7)));
    assert_eq!((tcp.count, tcp.user_timeout_ms), (None, Some(9)));
    assert_eq!(tcp.interval, Tcp::default().interval);
    assert!(!database("host=h keepalives=0").tcp.keepalives);
    url_refused(
        "host=h keepalives_idle=soon",
        &["keepalives_idle", "whole number"],
    );
}

#[test]
fn every_sslmode_is_known_and_its_words_must_agree() {
    for (word, mode) in [
        ("disable", SslMode::Disable),
        ("allow", SslMode::Allow),
        ("prefer", SslMode::Prefer),
        ("require", SslMode::Require),
        ("verify-ca", SslMode::VerifyCa),
        ("verify-full", SslMode::VerifyFull),
    ] {
        let tls = database(&format!("host=h sslrootcert=/ca sslmode={word}")).tls;
        assert_eq!(tls.sslmode, mode);
        assert_eq!(tls.root, Root::File(Pem::Named(PathBuf::from("/ca"))));
        let env = around(&[("PGSSLMODE", word), ("PGSSLROOTCERT", "/ca")]);
        let config = run_in(&env, &["--database-url", "host=h"]).expect("right");
        assert_eq!(config.source.database.tls, tls);
    }
    let system = database("host=h sslrootcert=system").tls;
    assert_eq!(
        (system.sslmode, system.root),
        (SslMode::VerifyFull, Root::System)
    );
    url_refused(
        "host=h sslmode=require sslrootcert=system",
        &["too weak", "verify-full"],
    );
    url_refused("host=h sslmode=verify-full", &["sslrootcert=FILE"]);
    url_refused(
        "host=h sslmode=required",
        &["sslmode", "not known", "verify-ca"],
    );
    assert_eq!(
        database("postgres://h/a?ssl=true").tls.sslmode,
        SslMode::Require
    );
    // Never read on a socket.
    let socket = database("host=/tmp sslmode=verify-full");
    assert!(socket.hosts[0].is_socket());
    url_refused("host=h sslnegotiation=direct", &["sslmode=require"]);
    let direct = database("host=h sslnegotiation=direct sslmode=require").tls;
    assert_eq!(direct.negotiation, Negotiation::Direct);
    let versions = "host=h ssl_min_protocol_version=TLSv1.3 ssl_max_protocol_version=TLSv1.2";
    url_refused(versions, &["below the least version"]);
}

#[test]
fn the_usual_files_are_in_the_home_directory() {
    let env = around(&[("HOME", "/home/ops")]);
    let found = run_in(&env, &["--database-url", "host=h"]).expect("right");
    let found = found.source.database;
    let usual = |name: &str| Pem::Usual(PathBuf::from(format!("/home/ops/.postgresql/{name}")));
    assert_eq!(found.passfile, Some(PathBuf::from("/home/ops/.pgpass")));
    assert_eq!(found.tls.root, Root::File(usual("root.crt")));
    assert_eq!(found.tls.cert, Some(usual("postgresql.crt")));
    assert_eq!(found.tls.key, Some(usual("postgresql.key")));
    assert_eq!(found.tls.crl, Some(usual("root.crl")));
    let env = around(&[
        ("HOME", "/home/ops"),
        ("PGPASSFILE", "/p"),
        ("PGSSLCERT", "/c"),
    ]);
    let args = ["--database-url", "host=h sslcertmode=allow sslkey=/k"];
    let found = run_in(&env, &args).expect("right").source.database;
    assert_eq!(found.passfile, Some(PathBuf::from("/p")));
    assert_eq!(found.tls.cert, Some(Pem::Named(PathBuf::from("/c"))));
    assert_eq!(found.tls.key, Some(Pem::Named(PathBuf::from("/k"))));
    let args = ["--database-url", "host=h sslcertmode=disable"];
    assert_eq!(
        run_in(&env, &args).expect("right").source.database.tls.cert,
        None
    );
}

#[test]
fn a_service_stands_between_the_string_and_the_variables() {
    let services = file(
        "# ours\n[other]\nhost=no\n\n[app]\nhost=svc\nport=7\nuser=svcuser\npassword=a b=c\n\n[after]\nport=9\n",
    );
    let env = around(&[
        ("PGSERVICEFILE", path(&services)),
        ("PGSERVICE", "app"),
        ("PGHOST", "env"),
        ("PGAPPNAME", "envapp"),
    ]);
    let found = run_in(&env, &["--database-url", "user=u"]).expect("right");
    let found = found.source.database;
    assert_eq!(places(&found), ["svc:7"]);
    assert_eq!(
        (found.user.as_str(), found.password.as_deref()),
        ("u", Some("a b=c"))
    );
    assert_eq!(found.application_name, "envapp");
    let by_word = format!("service=after servicefile={}", path(&services));
    assert_eq!(places(&database(&by_word)), ["/var/run/postgresql:9"]);
    refused_in(
        &env,
        &["--database-url", "service=none"],
        &["\"none\"", "no file defines"],
    );
    url_refused(
        "service=app servicefile=/no/such",
        &["servicefile", "cannot be read"],
    );
    for (line, words) in [
        ("prot=1", &["did you mean port?", ":2"][..]),
        ("ldap://x", &["LDAP"]),
        ("service=b", &["a service within a service"]),
        ("password", &["no ="]),
    ] {
        let bad = file(&format!("[app]\n{line}\n"));
        let env = around(&[("PGSERVICEFILE", path(&bad)), ("PGSERVICE", "app")]);
        refused_in(&env, &[], words);
    }
}

#[test]
fn bad_words_of_a_connection_string_are_named() {
    url_refused("host=h prot=1", &["unknown key prot", "did you mean port?"]);
    url_refused("host=h port=0", &["no port"]);
    url_refused("postgres://h:99999/a", &["port"]);
    url_refused("postgres://::1/a", &["brackets"]);
    url_refused("postgres://h/a/b", &["/"]);
    url_refused("postgres://h/a\n", &["white space"]);
    url_refused("host=h connect_timeout=3601", &["connect_timeout"]);
    // libpq waits for ever; we do not.
    let database = database("host=h connect_timeout=0");
    assert_eq!(database.connect_timeout, Duration::from_secs(10));
    url_refused("jdbc:postgresql://h/a", &["not Postgres's scheme"]);
    url_refused("mysql://u:secret@h/a", &["not Postgres's scheme"]);
}
