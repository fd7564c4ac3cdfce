//! Connection strings.

use std::path::PathBuf;
use std::time::Duration;

use super::super::{Database, RunConfig, SslMode};
use super::{around, database, refused_in, run, run_in, url_refused};

#[test]
fn a_url_with_everything() {
    let database = database(
        "postgresql://u%40x:p%40ss@db.example:6432/App-DB?sslmode=verify-full\
         &sslrootcert=%2Fca.pem&application_name=r&connect_timeout=7",
    );
    assert_eq!(
        database,
        Database {
            host: "db.example".to_owned(),
            port: 6432,
            user: "u@x".to_owned(),
            password: Some("p@ss".to_owned()),
            dbname: "App-DB".to_owned(),
            sslmode: SslMode::VerifyFull,
            sslrootcert: Some(PathBuf::from("/ca.pem")),
            application_name: "r".to_owned(),
            connect_timeout: Duration::from_secs(7),
        }
    );
}

/// Case C09.
#[test]
fn sockets_and_ipv6() {
    let place = |url: &str| {
        let database = database(url);
        (database.host, database.port, database.user, database.dbname)
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
    assert_eq!(config.source.database.host, "localhost");
    assert_eq!(config.source.database.sslmode, SslMode::Prefer);
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
        let text = url_refused(
            &format!("postgresql://u:{raw}@db/app"),
            &["percent-encode @ : / # % ? in the password", "***"],
        );
        assert!(
            !text.contains("cret") && !text.contains("12"),
            "{raw}: {text}"
        );
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
        "postgres://u:secret@h/a",
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
    assert_eq!(database.host, "a b");
    assert_eq!(database.user, "it's");
    assert_eq!(database.password.as_deref(), Some(r"x'y\z"));
    assert_eq!(database.dbname, "it's");
    assert_eq!(database.port, 6000);
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
    assert_eq!(database.host, "envhost");
    assert_eq!(database.port, 6000);
    assert_eq!(database.user, "envuser");
    assert_eq!(database.password.as_deref(), Some("envpass"));
    assert_eq!(database.dbname, "envdb");
    assert_eq!(database.sslmode, SslMode::Require);
    assert_eq!(database.application_name, "envapp");
    assert_eq!(database.connect_timeout, Duration::from_secs(2));
    let args = ["--database-url", "postgres://u@h/a?sslmode=disable"];
    let database = run_in(&env, &args).expect("right").source.database;
    assert_eq!((database.host.as_str(), database.port), ("h", 6000));
    assert_eq!(database.user, "u");
    assert_eq!(database.sslmode, SslMode::Disable);
    let empty = around(&[("PGHOST", ""), ("PGPORT", "")]);
    let database = run_in(&empty, &[]).expect("right").source.database;
    assert_eq!(database.port, 5432);
}

#[test]
fn words_of_libpq_that_come_later_are_refused_by_name() {
    for word in [
        "passfile",
        "options",
        "sslcert",
        "target_session_attrs",
        "service",
        "hostaddr",
    ] {
        url_refused(&format!("host=h {word}=x"), &[word, "not built yet"]);
        url_refused(
            &format!("postgres://h/a?{word}=x"),
            &[word, "not built yet"],
        );
    }
    for mode in ["allow", "verify-ca"] {
        url_refused(&format!("host=h sslmode={mode}"), &[mode, "not built yet"]);
    }
    for several in [
        "postgres://a,b/x",
        "postgres://a:1,b:2/x",
        "host=a,b",
        "host=a port=1,2",
    ] {
        url_refused(several, &["several", "not built yet"]);
    }
    let env = around(&[("PGPASSFILE", "/x")]);
    refused_in(&env, &[], &["PGPASSFILE", "not built yet"]);
    let env = around(&[("PGSSLMODE", "allow")]);
    refused_in(
        &env,
        &["--database-url", "host=h"],
        &["PGSSLMODE", "not built yet"],
    );
}

#[test]
fn tls_words_must_agree() {
    url_refused("host=h sslmode=verify-full", &["sslrootcert=FILE"]);
    url_refused(
        "host=h sslmode=verify-full sslrootcert=system",
        &["not built yet"],
    );
    url_refused("host=h sslmode=require sslrootcert=/ca", &["verify-full"]);
    url_refused("host=h sslmode=required", &["no sslmode"]);
    assert_eq!(
        database("postgres://h/a?ssl=true").sslmode,
        SslMode::Require
    );
    // libpq leaves TLS out on a socket.
    let socket = database("host=/tmp sslmode=verify-full");
    assert_eq!(socket.sslmode, SslMode::Disable);
}

#[test]
fn bad_words_of_a_connection_string_are_named() {
    url_refused("host=h prot=1", &["unknown key prot", "did you mean port?"]);
    url_refused("host=h port=0", &["no port"]);
    url_refused("postgres://h:99999/a", &["port"]);
    url_refused("postgres://::1/a", &["brackets"]);
    url_refused("postgres://h/a/b", &["/"]);
    url_refused("postgres://h/a\n", &["white space"]);
    url_refused("host=h connect_timeout=0", &["connect_timeout"]);
    url_refused("jdbc:postgresql://h/a", &["not Postgres's scheme"]);
    url_refused("mysql://u:secret@h/a", &["not Postgres's scheme"]);
}
