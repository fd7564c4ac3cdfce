//! The only unsafe files, this one and those below it: what rdkafka's safe interface lacks. Here the
//! wake-up. (What it offers is a thread that polls: an idle relay would not sleep, and a busy one
//! would learn of a bad report while it is sending the next record.)
#![allow(unsafe_code)]

pub mod admin;

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdkafka::ClientContext;
use rdkafka::bindings as rd;
use rdkafka::client::{Client, OAuthToken};
use rdkafka::producer::{BaseProducer, Producer as _};
use tokio::sync::Notify;

use super::context::Inbox;

/// Raised by librdkafka's threads when the main queue is no longer empty.
#[derive(Default)]
pub struct Signal {
    raised: AtomicBool,
    notify: Notify,
}

impl Signal {
    /// One waiter at most: a second call before it wakes leaves one permit, not two.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        self.notify.notify_one();
    }

    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// To be called before the queue is emptied: what arrives later raises it again.
    pub fn lower(&self) {
        self.raised.store(false, Ordering::Release);
    }

    pub async fn wait(&self) {
        self.notify.notified().await;
    }
}

/// A producer whose main queue raises a [`Signal`].
pub struct Producer {
    // Declared, and so dropped, before the client that owns the queue underneath.
    queue: MainQueue,
    client: BaseProducer<Inbox>,
}

impl Producer {
    pub fn new(client: BaseProducer<Inbox>, signal: Arc<Signal>) -> Self {
        let queue = MainQueue::watch(&client, signal);
        Producer { queue, client }
    }

    pub fn client(&self) -> &BaseProducer<Inbox> {
        &self.client
    }

    /// Events that wait to be polled.
    pub fn queue_length(&self) -> usize {
        // SAFETY: the handle is live until `MainQueue` is dropped; the call locks for itself.
        unsafe { rd::rd_kafka_queue_length(self.queue.handle.as_ptr()) }
    }
}

/// Gives a client the token that it logs in with. (One that is polled asks for it by itself.)
///
/// # Errors
/// The library's words: a token that has expired.
pub fn set_token<C: ClientContext>(client: &Client<C>, token: &OAuthToken) -> Result<(), String> {
    let value = CString::new(token.token.as_str()).map_err(|error| error.to_string())?;
    let principal =
        CString::new(token.principal_name.as_str()).map_err(|error| error.to_string())?;
    let mut words = [0; 256];
    // SAFETY: the client is live, the strings are for the time of the call, which copies them; the
    // buffer's length is the one that is given, and the library ends its words with a NUL.
    unsafe {
        let code = rd::rd_kafka_oauthbearer_set_token(
            client.native_ptr(),
            value.as_ptr(),
            token.lifetime_ms,
            principal.as_ptr(),
            std::ptr::null_mut(),
            0,
            words.as_mut_ptr(),
            words.len(),
        );
        if code as i32 == 0 {
            return Ok(());
        }
        Err(CStr::from_ptr(words.as_ptr())
            .to_string_lossy()
            .into_owned())
    }
}

/// Changes user and password of a client that lives: the next login is with these.
pub fn set_login(client: &BaseProducer<Inbox>, user: &str, password: &str) {
    let (Ok(user), Ok(password)) = (CString::new(user), CString::new(password)) else {
        return;
    };
    // SAFETY: the client is live, the strings are for the time of the call, which copies them; an
    // error is ours to destroy. There is none for strings that are not null.
    unsafe {
        let client = client.client().native_ptr();
        let error = rd::rd_kafka_sasl_set_credentials(client, user.as_ptr(), password.as_ptr());
        if !error.is_null() {
            rd::rd_kafka_error_destroy(error);
        }
    }
}

struct MainQueue {
    handle: NonNull<rd::rd_kafka_queue_t>,
    /// What the callback's opaque points to.
    _signal: Arc<Signal>,
}

// SAFETY: librdkafka's queues are thread-safe, and the handle is used through `&self` only.
unsafe impl Send for MainQueue {}
// SAFETY: as above.
unsafe impl Sync for MainQueue {}

impl MainQueue {
    fn watch(client: &BaseProducer<Inbox>, signal: Arc<Signal>) -> Self {
        // SAFETY: the client is live. The handle counts a reference on the queue, given back in
        // `drop`. The opaque is valid as long as the callback is set: `_signal` keeps it, and
        // `drop` clears the callback first.
        unsafe {
            let handle = rd::rd_kafka_queue_get_main(client.client().native_ptr());
            let handle = NonNull::new(handle).expect("every client has a main queue");
            rd::rd_kafka_queue_cb_event_enable(
                handle.as_ptr(),
                Some(on_event),
                Arc::as_ptr(&signal).cast::<c_void>().cast_mut(),
            );
            let watched = MainQueue {
                handle,
                _signal: signal,
            };
            // librdkafka calls back on empty -> not empty only: what came before was not announced.
            watched._signal.raise();
            watched
        }
    }
}

impl Drop for MainQueue {
    fn drop(&mut self) {
        // SAFETY: the handle is live. librdkafka calls the callback with the queue's lock held and
        // takes the same lock to clear it, so none is running afterwards.
        unsafe {
            rd::rd_kafka_queue_cb_event_enable(self.handle.as_ptr(), None, std::ptr::null_mut());
            rd::rd_kafka_queue_destroy(self.handle.as_ptr());
        }
    }
}

/// Runs on librdkafka's threads with the queue's lock held: must not call the library.
unsafe extern "C" fn on_event(_client: *mut rd::rd_kafka_t, opaque: *mut c_void) {
    // SAFETY: `MainQueue` keeps the signal alive until it has cleared this callback.
    let signal = unsafe { &*opaque.cast::<Signal>() };
    signal.raise();
}
