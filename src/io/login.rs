//! From a connected stream to a session that is ready for queries: start-up message,
//! authentication, the server's particulars (Postgres manual, "Message Flow", "Start-up").

use postgres_protocol::authentication::{md5_hash, sasl};
use postgres_protocol::message::backend::{AuthenticationSaslBody, Message};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::fallible_iterator::FallibleIterator;

use super::conversation::{Conversation, server_error};
use crate::config::{Auth, ChannelBinding, Method};
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
    pub password: Option<Vec<u8>>,
    /// Why a password file that is there was not asked.
    pub passfile_ignored: Option<String>,
    pub auth: &'a Auth,
    /// `tls-server-end-point` data of the server's certificate (RFC 5929).
    pub binding_data: Option<Vec<u8>>,
    pub secrecy: Secrecy,
}

/// What the server said of the session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Login {
    pub process_id: i32,
    pub secret_key: i32,
    pub in_hot_standby: bool,
    pub default_transaction_read_only: bool,
}

impl Credentials<'_> {
    fn password(&self) -> Result<&[u8], DbError> {
        self.password.as_deref().ok_or_else(|| {
            DbError::Auth(match &self.passfile_ignored {
                Some(why) => format!("no password supplied; {why}"),
                None => "no password supplied".to_owned(),
            })
        })
    }

    /// Refuses a method that `require_auth` or `channel_binding` rules out, before anything that
    /// is secret is said.
    fn admit(&self, method: Method) -> Result<(), DbError> {
        let word = match method {
            Method::None => "the server lets us in without asking who we are",
            Method::Password => "the server asks for the password in clear text",
            Method::Md5 => "the server asks for md5",
            Method::ScramSha256 => "the server asks for scram-sha-256",
        };
        if let Some(methods) = &self.auth.methods
            && !methods.allowed.contains(&method)
        {
            return Err(DbError::Auth(format!(
                "{word}, and require_auth={} forbids it",
                methods.written
            )));
        }
        if self.auth.channel_binding == ChannelBinding::Require && method != Method::ScramSha256 {
            return Err(DbError::Auth(format!(
                "{word}, and channel_binding=require asks for scram-sha-256 over TLS"
            )));
        }
        let may_be_overheard = self.auth.methods.as_ref().is_some_and(|m| m.clear_password);
        if method == Method::Password && self.secrecy == Secrecy::Overheard && !may_be_overheard {
            return Err(DbError::Auth(format!(
                "{word} over a connection without TLS"
            )));
        }
        Ok(())
    }
}

/// Logs in.
///
/// # Errors
/// What the server refused, in its own words; a method of authentication that is not spoken here,
/// or not allowed.
pub async fn login<S: AsyncRead + AsyncWrite + Unpin>(
    conversation: &mut Conversation<S>,
    parameters: &[(&str, &str)],
    credentials: &Credentials<'_>,
) -> Result<Login, DbError> {
    conversation
        .send(|buf| frontend::startup_message(parameters.iter().copied(), buf))
        .await?;
    let mut was_asked = false;
    loop {
        match receive(conversation).await? {
            Message::AuthenticationOk if was_asked => break,
            Message::AuthenticationOk => {
                credentials.admit(Method::None)?;
                break;
            }
            Message::AuthenticationSasl(body) => {
                credentials.admit(Method::ScramSha256)?;
                scram(conversation, &body, credentials).await?;
            }
            Message::AuthenticationMd5Password(body) => {
                credentials.admit(Method::Md5)?;
                let password = credentials.password()?;
                let hash = md5_hash(credentials.user.as_bytes(), password, body.salt());
                send_password(conversation, hash.as_bytes()).await?;
            }
            Message::AuthenticationCleartextPassword => {
                credentials.admit(Method::Password)?;
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
        was_asked = true;
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
    let (mechanism, binding) = binding(plain, plus, credentials)?;
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

/// Which of the offered mechanisms is spoken, and whether it is bound to the server's certificate.
fn binding(
    plain: bool,
    plus: bool,
    credentials: &Credentials<'_>,
) -> Result<(&'static str, sasl::ChannelBinding), DbError> {
    let wanted = credentials.auth.channel_binding;
    let data = credentials.binding_data.as_ref();
    match data.filter(|_| wanted != ChannelBinding::Disable) {
        Some(data) if plus => Ok((
            sasl::SCRAM_SHA_256_PLUS,
            sasl::ChannelBinding::tls_server_end_point(data.clone()),
        )),
        _ if wanted == ChannelBinding::Require => Err(DbError::Auth(
            match data {
                Some(_) => "channel_binding=require, and the server does not offer it",
                None => "channel_binding=require, and the connection is without TLS",
            }
            .to_owned(),
        )),
        // "Unrequested" tells a server that could bind that its offer was cut out on the way.
        Some(_) if plain => Ok((sasl::SCRAM_SHA_256, sasl::ChannelBinding::unrequested())),
        None if plain => Ok((sasl::SCRAM_SHA_256, sasl::ChannelBinding::unsupported())),
        Some(_) | None => Err(DbError::Auth(
            "the server offers no SASL mechanism that is known here (scram-sha-256)".to_owned(),
        )),
    }
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
) -> Result<Login, DbError> {
    let mut login = Login::default();
    loop {
        match receive(conversation).await? {
            Message::BackendKeyData(body) => {
                login.process_id = body.process_id();
                login.secret_key = body.secret_key();
            }
            Message::ParameterStatus(body) => {
                let is_on = body.value().is_ok_and(|value| value == "on");
                match body.name() {
                    Ok("in_hot_standby") => login.in_hot_standby = is_on,
                    Ok("default_transaction_read_only") => {
                        login.default_transaction_read_only = is_on;
                    }
                    Ok(_) | Err(_) => {}
                }
            }
            Message::NoticeResponse(_) => {}
            Message::ReadyForQuery(_) => return Ok(login),
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
    use crate::config::Methods;
    use tokio::io::{AsyncWriteExt, duplex};

    const ASKS_CLEAR: &[u8] = b"R\0\0\0\x08\0\0\0\x03";
    const ASKS_MD5: &[u8] = b"R\0\0\0\x0c\0\0\0\x05salt";
    const ASKS_SCRAM: &[u8] = b"R\0\0\0\x17\0\0\0\x0aSCRAM-SHA-256\0\0";
    const OK: &[u8] = b"R\0\0\0\x08\0\0\0\0K\0\0\0\x0c\0\0\0\x2a\0\0\0\x07\
        S\0\0\0\x16in_hot_standby\0on\0Z\0\0\0\x05I";

    /// What a login makes of a server that says `script` and closes.
    async fn answer(
        script: &[u8],
        password: Option<&str>,
        auth: &Auth,
        secrecy: Secrecy,
    ) -> Result<Login, DbError> {
        let (ours, mut theirs) = duplex(1 << 12);
        theirs.write_all(script).await.expect("the pipe is wide");
        theirs.shutdown().await.expect("it is open");
        let credentials = Credentials {
            user: "u",
            password: password.map(|p| p.as_bytes().to_vec()),
            passfile_ignored: None,
            auth,
            binding_data: None,
            secrecy,
        };
        login(&mut Conversation::new(ours), &[("user", "u")], &credentials).await
    }

    async fn plainly(script: &[u8], password: Option<&str>) -> Result<Login, DbError> {
        answer(script, password, &Auth::default(), Secrecy::Overheard).await
    }

    fn require(allowed: &[Method], clear_password: bool) -> Auth {
        Auth {
            methods: Some(Methods {
                written: "x".to_owned(),
                allowed: allowed.to_vec(),
                clear_password,
            }),
            ..Auth::default()
        }
    }

    #[tokio::test]
    async fn trust_needs_no_password_and_a_standby_says_that_it_is_one() {
        let login = plainly(OK, None).await.expect("it is trusted");
        assert_eq!((login.process_id, login.secret_key), (42, 7));
        assert!(login.in_hot_standby && !login.default_transaction_read_only);
    }

    #[tokio::test]
    async fn a_password_is_never_said_aloud_unless_asked_for() {
        let asked = plainly(ASKS_CLEAR, Some("secret")).await;
        assert!(matches!(asked, Err(DbError::Auth(text)) if text.contains("clear text")));
        let script = [ASKS_CLEAR, OK].concat();
        let all_but_md5 = require(&[Method::Password, Method::ScramSha256], false);
        let asked = answer(&script, Some("secret"), &all_but_md5, Secrecy::Overheard).await;
        assert!(matches!(asked, Err(DbError::Auth(_))));
        let by_name = require(&[Method::Password], true);
        let asked = answer(&script, Some("secret"), &by_name, Secrecy::Overheard).await;
        assert_eq!(asked.map(|login| login.process_id), Ok(42));
        let asked = answer(&script, Some("secret"), &Auth::default(), Secrecy::Private).await;
        assert_eq!(asked.map(|login| login.process_id), Ok(42));
    }

    #[tokio::test]
    async fn a_method_that_is_not_allowed_gets_no_answer() {
        let scram_only = require(&[Method::ScramSha256], false);
        for script in [ASKS_CLEAR, ASKS_MD5, OK] {
            let asked = answer(script, Some("secret"), &scram_only, Secrecy::Private).await;
            assert!(matches!(asked, Err(DbError::Auth(text)) if text.contains("require_auth=x")));
        }
        let bound = Auth {
            channel_binding: ChannelBinding::Require,
            methods: None,
        };
        for script in [ASKS_CLEAR, ASKS_MD5, ASKS_SCRAM, OK] {
            let asked = answer(script, Some("secret"), &bound, Secrecy::Private).await;
            assert!(
                matches!(asked, Err(DbError::Auth(text)) if text.contains("channel_binding=require"))
            );
        }
    }

    #[tokio::test]
    async fn no_password_is_said_to_be_missing() {
        let asked = plainly(ASKS_SCRAM, None).await;
        assert!(matches!(asked, Err(DbError::Auth(text)) if text.contains("no password")));
    }

    #[tokio::test]
    async fn a_refusal_keeps_its_sqlstate_even_where_its_text_is_no_utf8() {
        let said = plainly(b"E\0\0\0\x18SFATAL\0C28000\0M\xe9t\xe9\0\0", None).await;
        let error = said.expect_err("it was refused");
        assert_eq!(error.sqlstate(), "28000");
    }

    #[tokio::test]
    async fn an_endless_claim_before_login_is_refused() {
        let said = plainly(b"E\x7f\xff\xff\xff", None).await;
        assert!(matches!(said, Err(DbError::Protocol(_))));
    }
}
