//! From a connected stream to a session that is ready for queries: start-up message,
//! authentication, the server's particulars (Postgres manual, "Message Flow", "Start-up").

use postgres_protocol::authentication::{md5_hash, sasl};
use postgres_protocol::message::backend::{AuthenticationSaslBody, Message};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::fallible_iterator::FallibleIterator;

use super::conversation::{Conversation, server_error};
use crate::error::DbError;

/// May a password cross this stream as it is?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Secrecy {
    /// TLS, or a Unix socket.
    Private,
    Overheard,
}

pub struct Credentials<'a> {
    pub user: &'a str,
    pub password: Option<&'a str>,
    /// `tls-server-end-point` data of the server's certificate (RFC 5929).
    pub channel_binding: Option<Vec<u8>>,
    pub secrecy: Secrecy,
}

impl Credentials<'_> {
    fn password(&self) -> Result<&[u8], DbError> {
        let password = self.password.map(str::as_bytes);
        password.ok_or_else(|| DbError::Auth("no password supplied".to_owned()))
    }
}

/// Logs in and returns the backend's process id.
///
/// # Errors
/// What the server refused, in its own words; a method of authentication that is not spoken here.
pub async fn login<S: AsyncRead + AsyncWrite + Unpin>(
    conversation: &mut Conversation<S>,
    parameters: &[(&str, &str)],
    credentials: &Credentials<'_>,
) -> Result<i32, DbError> {
    conversation
        .send(|buf| frontend::startup_message(parameters.iter().copied(), buf))
        .await?;
    loop {
        match receive(conversation).await? {
            Message::AuthenticationOk => break,
            Message::AuthenticationSasl(body) => scram(conversation, &body, credentials).await?,
            Message::AuthenticationMd5Password(body) => {
                let password = credentials.password()?;
                let hash = md5_hash(credentials.user.as_bytes(), password, body.salt());
                send_password(conversation, hash.as_bytes()).await?;
            }
            Message::AuthenticationCleartextPassword => {
                if credentials.secrecy == Secrecy::Overheard {
                    return Err(DbError::Auth(
                        "the server asks for the password in clear text over a connection \
                         without TLS"
                            .to_owned(),
                    ));
                }
                send_password(conversation, credentials.password()?).await?;
            }
            Message::AuthenticationGss
            | Message::AuthenticationKerberosV5
            | Message::AuthenticationScmCredential
            | Message::AuthenticationSspi => {
                return Err(DbError::Auth(
                    "the server asks for GSSAPI, SSPI or SCM authentication; scram-sha-256, \
                     md5, password and trust are supported"
                        .to_owned(),
                ));
            }
            _ => return Err(unexpected("the authentication")),
        }
    }
    ready(conversation).await
}

async fn scram<S: AsyncRead + AsyncWrite + Unpin>(
    conversation: &mut Conversation<S>,
    offer: &AuthenticationSaslBody,
    credentials: &Credentials<'_>,
) -> Result<(), DbError> {
    let mut mechanisms = offer.mechanisms();
    let (mut plain, mut plus) = (false, false);
    while let Some(name) = mechanisms.next().map_err(|e| broken(&e))? {
        plain |= name == sasl::SCRAM_SHA_256;
        plus |= name == sasl::SCRAM_SHA_256_PLUS;
    }
    let (mechanism, binding) = match &credentials.channel_binding {
        Some(data) if plus => (
            sasl::SCRAM_SHA_256_PLUS,
            sasl::ChannelBinding::tls_server_end_point(data.clone()),
        ),
        // "Unrequested" tells a server that could bind that its offer was cut out on the way.
        Some(_) if plain => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unrequested()),
        None if plain => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unsupported()),
        Some(_) | None => {
            return Err(DbError::Auth(
                "the server offers no SASL mechanism that is known here (scram-sha-256)".to_owned(),
            ));
        }
    };
    let mut scram = sasl::ScramSha256::new(credentials.password()?, binding);
    conversation
        .send(|buf| frontend::sasl_initial_response(mechanism, scram.message(), buf))
        .await?;
    let Message::AuthenticationSaslContinue(body) = receive(conversation).await? else {
        return Err(unexpected("the SCRAM exchange"));
    };
    scram.update(body.data()).map_err(|e| untrusted(&e))?;
    conversation
        .send(|buf| frontend::sasl_response(scram.message(), buf))
        .await?;
    let Message::AuthenticationSaslFinal(body) = receive(conversation).await? else {
        return Err(unexpected("the SCRAM exchange"));
    };
    scram.finish(body.data()).map_err(|e| untrusted(&e))
}

async fn send_password<S: AsyncRead + AsyncWrite + Unpin>(
    conversation: &mut Conversation<S>,
    password: &[u8],
) -> Result<(), DbError> {
    conversation
        .send(|buf| frontend::password_message(password, buf))
        .await
}

/// Reads up to ReadyForQuery.
async fn ready<S: AsyncRead + AsyncWrite + Unpin>(
    conversation: &mut Conversation<S>,
) -> Result<i32, DbError> {
    let mut process_id = 0;
    loop {
        match receive(conversation).await? {
            Message::BackendKeyData(body) => process_id = body.process_id(),
            Message::ParameterStatus(_) | Message::NoticeResponse(_) => {}
            Message::ReadyForQuery(_) => return Ok(process_id),
            _ => return Err(unexpected("the start of the session")),
        }
    }
}

/// The next message; an ErrorResponse is an error.
async fn receive<S: AsyncRead + AsyncWrite + Unpin>(
    conversation: &mut Conversation<S>,
) -> Result<Message, DbError> {
    let range = conversation.recv().await?;
    match conversation.message(range)? {
        Message::ErrorResponse(body) => Err(server_error(body.fields())),
        message => Ok(message),
    }
}

fn unexpected(during: &str) -> DbError {
    DbError::Protocol(format!("an unexpected message during {during}"))
}

fn broken(error: &std::io::Error) -> DbError {
    DbError::Protocol(error.to_string())
}

/// The server could not prove that it knows the password, or speaks another dialect of SCRAM.
fn untrusted(error: &std::io::Error) -> DbError {
    DbError::Auth(format!("the server's side of SCRAM-SHA-256 fails: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncWriteExt, duplex};

    /// What a login makes of a server that says `script` and closes.
    async fn answer(script: &[u8], password: Option<&str>) -> Result<i32, DbError> {
        let (ours, mut theirs) = duplex(1 << 12);
        theirs.write_all(script).await.expect("the pipe is wide");
        theirs.shutdown().await.expect("it is open");
        let credentials = Credentials {
            user: "u",
            password,
            channel_binding: None,
            secrecy: Secrecy::Overheard,
        };
        login(&mut Conversation::new(ours), &[("user", "u")], &credentials).await
    }

    #[tokio::test]
    async fn trust_needs_no_password() {
        let script = b"R\0\0\0\x08\0\0\0\0K\0\0\0\x0c\0\0\0\x2a\0\0\0\0Z\0\0\0\x05I";
        assert_eq!(answer(script, None).await, Ok(42));
    }

    #[tokio::test]
    async fn a_password_is_never_said_aloud() {
        let asked = answer(b"R\0\0\0\x08\0\0\0\x03", Some("secret")).await;
        assert!(matches!(asked, Err(DbError::Auth(text)) if text.contains("clear text")));
    }

    #[tokio::test]
    async fn no_password_is_said_to_be_missing() {
        let asked = answer(b"R\0\0\0\x17\0\0\0\x0aSCRAM-SHA-256\0\0", None).await;
        assert!(matches!(asked, Err(DbError::Auth(text)) if text.contains("no password")));
    }

    #[tokio::test]
    async fn a_refusal_keeps_its_sqlstate_even_where_its_text_is_no_utf8() {
        let said = answer(b"E\0\0\0\x18SFATAL\0C28000\0M\xe9t\xe9\0\0", None).await;
        let error = said.expect_err("it was refused");
        assert_eq!(error.sqlstate(), "28000");
    }

    #[tokio::test]
    async fn an_endless_claim_before_login_is_refused() {
        let said = answer(b"E\x7f\xff\xff\xff", None).await;
        assert!(matches!(said, Err(DbError::Protocol(_))));
    }
}
