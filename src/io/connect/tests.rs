use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

fn db(port: u16, sslmode: SslMode) -> Database {
    let mut db = Database::plain("127.0.0.1", port, "u", "d");
    db.tls.sslmode = sslmode;
    db.connect_timeout = Duration::from_secs(5);
    db
}

/// A server that answers every request for TLS with `answer`.
async fn server(answer: &'static [u8]) -> (u16, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let server = tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((mut tcp, _)) = listener.accept().await {
            let mut request = [0; 8];
            if tcp.read_exact(&mut request).await.is_ok() {
                let _ = tcp.write_all(answer).await;
                kept.push(tcp);
            }
        }
    });
    (port, server)
}

/// What one attempt makes of it.
async fn open_with(answer: &'static [u8], encrypt: Encrypt) -> Result<Stream, Missed> {
    let (port, server) = server(answer).await;
    let db = db(port, SslMode::Prefer);
    let setup = LazySetup::new();
    let ip = Address::Ip("127.0.0.1".parse().expect("an address"));
    let deadline = Deadline::new(db.connect_timeout);
    let opened = open(&db, &db.hosts[0], ip, encrypt, &setup, deadline).await;
    server.abort();
    opened
}

#[tokio::test]
async fn bytes_slipped_in_before_the_handshake_are_refused_and_not_asked_again() {
    for (answer, encrypt) in [
        (&b"SZ"[..], Encrypt::Always),
        (&b"NZ"[..], Encrypt::IfOffered),
    ] {
        let Err(missed) = open_with(answer, encrypt).await else {
            panic!("someone is in between");
        };
        assert!(matches!(&missed.error, DbError::Tls(text) if text.contains("in between")));
        assert!(!missed.is_of_encryption);
    }
}

#[tokio::test]
async fn a_server_without_tls_is_enough_where_tls_is_not_asked_for() {
    let opened = open_with(b"N", Encrypt::IfOffered).await;
    assert!(matches!(opened, Ok(Stream::Tcp(_))));
    let Err(missed) = open_with(b"N", Encrypt::Always).await else {
        panic!("there is no TLS");
    };
    assert!(matches!(missed.error, DbError::Tls(text) if text.contains("offers no TLS")));
}

#[tokio::test]
async fn an_error_in_place_of_an_answer_is_not_read_and_may_heal() {
    let error = b"E\0\0\0\x20SFATAL\0C53300\0Mtoo many\0\0";
    for encrypt in [Encrypt::Always, Encrypt::IfOffered] {
        let Err(Missed {
            error,
            is_of_encryption,
        }) = open_with(error, encrypt).await
        else {
            panic!("there is no TLS");
        };
        assert!(error.heals_with_time() && !error.to_string().contains("too many"));
        assert!(is_of_encryption, "without TLS it may be different");
    }
}

#[tokio::test]
async fn what_is_no_postgres_is_said_to_be_none() {
    let (port, _server) = server(b"HTTP/1.1 400 Bad Request").await;
    let opened = session(&db(port, SslMode::Prefer), &[]).await;
    assert!(matches!(opened, Err(DbError::Protocol(text)) if text.contains("no Postgres")));
}

async fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    listener.local_addr().expect("it is bound").port()
}

#[tokio::test]
async fn a_closed_port_and_a_missing_socket_are_named() {
    let port = closed_port().await;
    let closed = session(&db(port, SslMode::Prefer), &[]).await;
    let wanted = format!("port {port}: 127.0.0.1 refused");
    assert!(matches!(closed, Err(DbError::Unreachable(text)) if text.contains(&wanted)));
    for name in ["/nowhere", "@nowhere"] {
        let mut local = db(5432, SslMode::VerifyFull);
        local.hosts[0].name = name.to_owned();
        let missing = session(&local, &[]).await;
        let wanted = format!("{name}/.s.PGSQL.5432");
        assert!(
            matches!(&missing, Err(DbError::Unreachable(text)) if text.contains(&wanted)),
            "{:?}",
            missing.err()
        );
    }
}

#[tokio::test]
async fn every_host_of_a_list_is_named_when_none_answers() {
    let mut db = db(closed_port().await, SslMode::Prefer);
    let mut other = db.hosts[0].clone();
    other.port = closed_port().await;
    db.hosts.push(other);
    let Err(error) = session(&db, &[]).await else {
        panic!("nothing listens");
    };
    let text = error.to_string();
    for host in &db.hosts {
        assert!(text.contains(&format!("port {}", host.port)), "{text}");
    }
    assert!(error.heals_with_time());
    let failure = failure(&error, &db).to_string();
    assert!(
        failure.contains(&format!("port {}, host", db.hosts[0].port)),
        "{failure}"
    );
}

#[tokio::test]
async fn an_abstract_socket_can_be_reached() {
    use std::os::linux::net::SocketAddrExt;
    let name = format!("walrelay-test-{}/.s.PGSQL.5432", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).expect("a name");
    let listener = std::os::unix::net::UnixListener::bind_addr(&address).expect("it is free");
    let mut local = db(5432, SslMode::Disable);
    local.hosts[0].name = format!("@walrelay-test-{}", std::process::id());
    let deadline = Deadline::new(local.connect_timeout);
    let (host, setup) = (&local.hosts[0], LazySetup::new());
    let opened = open(
        &local,
        host,
        Address::Socket,
        Encrypt::Never,
        &setup,
        deadline,
    );
    assert!(matches!(opened.await, Ok(Stream::Unix(_))));
    drop(listener);
}
