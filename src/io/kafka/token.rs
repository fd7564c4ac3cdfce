//! Tokens for OAUTHBEARER: a command of the operator's prints them. It is run on a thread of its
//! own and well before the token in use ends, so that the client library's question for a token,
//! which comes on the thread that relays, is answered from memory.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rdkafka::client::OAuthToken;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use tokio::sync::watch;

use super::ClientNotice;
use crate::record::KafkaCode;

const RUN_WITHIN: Duration = Duration::from_secs(10);
const OUTPUT_BYTES_MAX: usize = 64 << 10;
/// A failed command is tried again after this, then after twice as long, and so on.
const AGAIN_AFTER_MIN: Duration = Duration::from_secs(1);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(30);
/// The client library asks for the next token when four fifths of a token's life are over: by then
/// the next one is to be here.
const REFRESH_AT_PERCENT: u32 = 75;
/// A token that lives for seconds is not asked for without a pause.
const REFRESH_AFTER_MIN: Duration = Duration::from_secs(1);
/// Longer than any token lives.
const LIFE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// AUTHENTICATION
const CODE: KafkaCode = KafkaCode(-169);

#[derive(Clone, PartialEq, Eq)]
struct Token {
    value: String,
    principal: String,
    expires: SystemTime,
}

#[derive(Default)]
struct State {
    token: Option<Token>,
    /// Why the last run gave none, and whether it was told already.
    failure: Option<(String, bool)>,
}

struct Shared {
    command: String,
    state: Mutex<State>,
    has_run: watch::Sender<bool>,
}

/// The tokens of one cluster, shared by all clients.
pub struct TokenSource {
    shared: Arc<Shared>,
    /// The thread ends when this is dropped.
    _alive: Sender<()>,
}

impl TokenSource {
    /// Starts to run the command.
    ///
    /// # Errors
    /// No thread could be had.
    pub fn start(command: String) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            command,
            state: Mutex::default(),
            has_run: watch::Sender::new(false),
        });
        let (alive, ended) = channel();
        let for_thread = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("kafka-token".into())
            .spawn(move || refresh_for_ever(&for_thread, &ended))?;
        Ok(TokenSource {
            shared,
            _alive: alive,
        })
    }

    /// Resolves when the command has been run once, within its ten seconds.
    pub async fn ready(&self) {
        let mut has_run = self.shared.has_run.subscribe();
        // The sender lives as long as `self`.
        let _ = has_run.wait_for(|has_run| *has_run).await;
    }

    /// The token in use. Does not block.
    ///
    /// # Errors
    /// There is none: why.
    pub fn token(&self) -> Result<OAuthToken, String> {
        let state = self.shared.state();
        let token = state
            .token
            .as_ref()
            .filter(|token| token.expires > SystemTime::now());
        match (token, &state.failure) {
            (Some(token), _) => Ok(OAuthToken {
                token: token.value.clone(),
                principal_name: token.principal.clone(),
                lifetime_ms: millis_since_epoch(token.expires),
            }),
            (None, Some((why, _))) => Err(why.clone()),
            (None, None) => Err("the token command has not ended yet".to_owned()),
        }
    }

    /// A failure that was not told yet.
    pub fn take_notice(&self) -> Option<ClientNotice> {
        let mut state = self.shared.state();
        let (why, is_told) = state.failure.as_mut()?;
        if std::mem::replace(is_told, true) {
            return None;
        }
        Some(ClientNotice {
            code: CODE,
            text: why.clone(),
            times: 1,
        })
    }
}

impl Shared {
    /// A panic elsewhere leaves these values whole.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn millis_since_epoch(at: SystemTime) -> i64 {
    let since = at
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn refresh_for_ever(shared: &Shared, ended: &Receiver<()>) {
    let mut again_after = AGAIN_AFTER_MIN;
    loop {
        let now = SystemTime::now();
        let printed = run(&shared.command, RUN_WITHIN);
        let pause = match printed.and_then(|printed| parse(&printed, now)) {
            Ok(token) => {
                let life = token.expires.duration_since(now).unwrap_or_default();
                let mut state = shared.state();
                state.token = Some(token);
                state.failure = None;
                again_after = AGAIN_AFTER_MIN;
                (life * REFRESH_AT_PERCENT / 100).max(REFRESH_AFTER_MIN)
            }
            Err(why) => {
                shared.state().failure = Some((format!("the token command {why}"), false));
                let pause = again_after;
                again_after = (again_after * 2).min(AGAIN_AFTER_MAX);
                pause
            }
        };
        shared.has_run.send_replace(true);
        match ended.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

// ---- the command ---------------------------------------------------------------------------

/// What the command prints, or what became of it, as the rest of a sentence. Never what it says on
/// its standard error: a traced script or client prints its secrets there.
fn run(command: &str, within: Duration) -> Result<String, String> {
    let until = Instant::now() + within;
    let not_started = |error: std::io::Error| format!("cannot be started: {error}");
    let mut watcher = watcher().map_err(not_started)?;
    let group = i32::try_from(watcher.id()).unwrap_or(0);
    let spawned = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(group)
        .spawn();
    let heard = spawned.map(|mut child| {
        let out = reader(child.stdout.take());
        let heard = hear(&mut child, &out, until);
        end_group(&watcher);
        let _ = child.wait();
        heard
    });
    end_group(&watcher);
    let _ = watcher.wait();
    let heard = heard.map_err(not_started)?;
    let (status, out) = heard.ok_or_else(|| format!("took longer than {within:?}"))?;
    if out.len() > OUTPUT_BYTES_MAX {
        return Err("printed more than 64 KiB".to_owned());
    }
    if !status.success() {
        return Err(format!(
            "ended with {status}; its standard error is not repeated, it may hold a secret"
        ));
    }
    String::from_utf8(out).map_err(|_| "printed what is no text".to_owned())
}

/// The output to its end and the exit status; `None` when the time is up first.
fn hear(
    child: &mut Child,
    out: &Receiver<Vec<u8>>,
    until: Instant,
) -> Option<(ExitStatus, Vec<u8>)> {
    let left = || until.saturating_duration_since(Instant::now());
    let out = out.recv_timeout(left()).ok()?;
    // Its output is closed: it is about to end, or has closed it to work on in silence.
    while !left().is_zero() {
        if let Ok(Some(status)) = child.try_wait() {
            return Some((status, out));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Reads to the end, keeping no more than is allowed and one byte.
fn reader(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        if let Some(mut pipe) = pipe {
            let limit = u64::try_from(OUTPUT_BYTES_MAX + 1).unwrap_or(u64::MAX);
            // What cannot be read counts as the end; a writer of more gets a closed pipe.
            let _ = pipe.by_ref().take(limit).read_to_end(&mut kept);
        }
        // Nobody listens any more: the time was up.
        let _ = tell.send(kept);
    });
    told
}

/// The head of a group that the command runs in. It waits for the end of a pipe that only we hold
/// and never write to: when this process ends, however it ends, the group does.
fn watcher() -> std::io::Result<Child> {
    Command::new("sh")
        .args(["-c", "read -r _; kill -9 0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}

/// What the command has started ends with it.
fn end_group(watcher: &Child) {
    if let Some(group) = i32::try_from(watcher.id()).ok().and_then(Pid::from_raw) {
        // All but the watcher are gone already, most often.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

// ---- what it prints ------------------------------------------------------------------------

#[derive(Deserialize)]
struct Response {
    access_token: String,
    /// Seconds; some servers write a number as text.
    #[serde(default)]
    expires_in: Option<serde_json::Value>,
    #[serde(default)]
    principal: Option<String>,
}

/// What a JSON web token says of itself, read without checking who signed it.
#[derive(Default, Deserialize)]
struct Claims {
    #[serde(default)]
    exp: Option<f64>,
    #[serde(default)]
    sub: Option<String>,
}

/// Never with a word of what was printed.
fn parse(printed: &str, now: SystemTime) -> Result<Token, String> {
    let printed = printed.trim();
    let response = if printed.starts_with('{') {
        serde_json::from_str(printed)
            .map_err(|_| "printed JSON without a text access_token".to_owned())?
    } else {
        Response {
            access_token: printed.to_owned(),
            expires_in: None,
            principal: None,
        }
    };
    let value = response.access_token;
    if value.is_empty() {
        return Err("printed nothing".to_owned());
    }
    if !value.chars().all(|c| c.is_ascii_graphic()) {
        return Err("printed neither one token nor JSON with access_token".to_owned());
    }
    let claims = claims(&value).unwrap_or_default();
    let life = match &response.expires_in {
        Some(serde_json::Value::Number(seconds)) => seconds.as_f64(),
        Some(serde_json::Value::String(seconds)) => seconds.parse().ok(),
        Some(_) => None,
        None => claims.exp.map(|at| at - seconds_since_epoch(now)),
    };
    let Some(life) = life else {
        return Err(
            "printed a token without a lifetime: print a JWT with exp, or JSON with expires_in"
                .to_owned(),
        );
    };
    let life = Duration::try_from_secs_f64(life).unwrap_or_default();
    if life.is_zero() {
        return Err("printed a token that has expired (is the clock right?)".to_owned());
    }
    Ok(Token {
        value,
        principal: response
            .principal
            .or(claims.sub)
            .filter(|principal| !principal.is_empty() && !principal.contains('\0'))
            .unwrap_or_else(|| "walrelay".to_owned()),
        expires: now + life.min(LIFE_MAX),
    })
}

fn seconds_since_epoch(at: SystemTime) -> f64 {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}

fn claims(token: &str) -> Option<Claims> {
    let mut parts = token.split('.');
    let (_, payload) = (parts.next()?, parts.next()?);
    let mut padded: String = payload
        .chars()
        .map(|c| match c {
            '-' => '+',
            '_' => '/',
            other => other,
        })
        .collect();
    while !padded.len().is_multiple_of(4) {
        padded.push('=');
    }
    let json = openssl::base64::decode_block(&padded).ok()?;
    serde_json::from_slice(&json).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_700_000_000);

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + NOW
    }

    fn jwt(claims: &str) -> String {
        let part = |json: &str| {
            let text = openssl::base64::encode_block(json.as_bytes());
            text.replace('+', "-").replace('/', "_").replace('=', "")
        };
        format!("{}.{}.c2ln", part("{\"alg\":\"none\"}"), part(claims))
    }

    fn read(printed: &str) -> Result<(String, u64), String> {
        let token = parse(printed, now())?;
        let life = token.expires.duration_since(now()).expect("later");
        Ok((token.principal, life.as_secs()))
    }

    #[test]
    fn a_bare_token_says_its_lifetime_and_principal_itself() {
        let token = jwt("{\"sub\":\"rélay~?\",\"exp\":1700000060}");
        assert_eq!(read(&format!("{token}\n")), Ok(("rélay~?".to_owned(), 60)));
        let token = jwt("{\"exp\":1700003600.5}");
        assert_eq!(read(&token), Ok(("walrelay".to_owned(), 3600)));
    }

    #[test]
    fn a_response_of_a_token_server_is_taken_as_it_is() {
        let printed = "{\"token_type\":\"Bearer\",\"access_token\":\"opaque\",\"expires_in\":300}";
        assert_eq!(read(printed), Ok(("walrelay".to_owned(), 300)));
        let printed = "{\"access_token\":\"a\",\"expires_in\":\"60\",\"principal\":\"p\"}";
        assert_eq!(read(printed), Ok(("p".to_owned(), 60)));
        let token = jwt("{\"sub\":\"s\",\"exp\":1700000060}");
        let printed = format!("{{\"access_token\":\"{token}\"}}");
        assert_eq!(read(&printed), Ok(("s".to_owned(), 60)));
    }

    #[test]
    fn what_is_no_token_is_named_without_showing_it() {
        let old = jwt("{\"sub\":\"s\",\"exp\":1699999999}");
        for (printed, word) in [
            ("", "nothing"),
            (" \n", "nothing"),
            ("s3cr3t", "without a lifetime"),
            ("s3cr3t and more", "neither"),
            ("{\"s3cr3t\":1}", "without a text access_token"),
            ("{\"access_token\":\"s3cr3t\"}", "without a lifetime"),
            ("{\"access_token\":\"s3cr3t\",\"expires_in\":-1}", "expired"),
            (
                "{\"access_token\":\"s3cr3t\",\"expires_in\":[1]}",
                "lifetime",
            ),
            (
                "{\"access_token\":\"s3\\u0000cr3t\",\"expires_in\":9}",
                "neither",
            ),
            (&old, "expired"),
        ] {
            let why = read(printed).expect_err(printed);
            assert!(why.contains(word), "{why}");
            assert!(!why.contains("s3"), "{why}");
        }
    }

    #[test]
    fn a_command_is_bounded_in_time_and_output() {
        let run = |command: &str| run(command, Duration::from_millis(500));
        assert_eq!(run("printf 'a b'").as_deref(), Ok("a b"));
        for command in ["sleep 30", "sleep 30 & echo a", "exec >&- 2>&-; sleep 30"] {
            let from = Instant::now();
            let why = run(command).expect_err(command);
            assert!(why.contains("took longer"), "{why}");
            assert!(from.elapsed() < Duration::from_secs(5));
        }
        let why = run("head -c 70000 /dev/zero | tr '\\0' a").expect_err("too much");
        assert_eq!(why, "printed more than 64 KiB");
        let why = run("echo no such realm >&2; exit 7").expect_err("fails");
        assert!(why.starts_with("ended with exit status: 7; "), "{why}");
        assert!(!why.contains("realm"), "{why}");
        let why = run("echo; no-such-command-here").expect_err("fails");
        assert!(why.contains("exit status: 127"), "{why}");
    }

    #[test]
    fn an_old_token_is_used_to_its_end_and_a_failure_is_told_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("token");
        let expires = seconds_since_epoch(SystemTime::now()) + 2.5;
        std::fs::write(&path, jwt(&format!("{{\"exp\":{expires}}}"))).expect("written");
        let source = TokenSource::start(format!("cat {}", path.display())).expect("a thread");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(source.ready());
        let token = source.token().expect("there is one");
        assert_eq!(token.principal_name, "walrelay");
        assert_eq!(source.take_notice(), None);
        std::fs::remove_file(&path).expect("it was there");
        let until = Instant::now() + Duration::from_secs(10);
        let mut notices = Vec::new();
        while source.token().is_ok() {
            notices.extend(source.take_notice());
            assert!(Instant::now() < until, "a token that has expired is given");
            std::thread::sleep(Duration::from_millis(20));
        }
        notices.extend(source.take_notice());
        assert!(!notices.is_empty(), "the failure came before the end");
        assert!(notices[0].text.contains("exit status: 1"), "{notices:?}");
        let why = source.token().err().expect("expired");
        assert!(why.contains("the token command ended"), "{why}");
    }
}
