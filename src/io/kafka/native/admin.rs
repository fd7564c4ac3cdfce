//! Questions of the admin API, asked over a client that is polled anyway. (rdkafka's own admin
//! client is another client with another connection, says nothing of rights, and never polls the
//! queue where a token is asked for and where the reason of a failure is told.)

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::NonNull;
use std::time::Duration;

use rdkafka::bindings as rd;
use rdkafka::producer::{BaseProducer, Producer as _};

use super::super::context::Inbox;
use crate::record::KafkaCode;

/// Why a question, or one topic of it, got no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: KafkaCode,
    pub text: String,
}

/// A broker, under the address that it wants to be reached at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: i32,
    pub host: String,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    pub id: i32,
    pub leader: Option<i32>,
    pub replicas: usize,
    pub in_sync: usize,
}

/// What may be done with a topic, by whoever asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    pub write: bool,
    pub read: bool,
    pub describe_configs: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    pub partitions: Vec<Partition>,
    /// `None`: the broker does not say.
    pub rights: Option<Rights>,
}

/// Names and values as the broker has them, defaults included.
pub type TopicConfig = Vec<(String, String)>;
/// Per topic.
pub type Each<T> = Vec<(String, Result<T, Refusal>)>;

pub enum Answer {
    Topics(Result<Each<Topic>, Refusal>),
    Configs(Result<Each<TopicConfig>, Refusal>),
}

/// Asks, and collects the answers in the order in which they come.
pub struct Questions<'c> {
    client: &'c BaseProducer<Inbox>,
    queue: NonNull<rd::rd_kafka_queue_t>,
}

impl<'c> Questions<'c> {
    pub fn over(client: &'c BaseProducer<Inbox>) -> Self {
        // SAFETY: the client is live; the queue is destroyed in `drop`, before the client can be.
        let queue = unsafe { rd::rd_kafka_queue_new(client.client().native_ptr()) };
        Questions {
            client,
            queue: NonNull::new(queue).expect("a queue is only memory"),
        }
    }

    /// Which brokers there are, as any one of them knows. (A question of the admin API waits for a
    /// broker at its advertised address, and whether there is one is what we want to know.) Blocks.
    ///
    /// # Errors
    /// No answer in time.
    pub fn brokers(&self, within: Duration) -> Result<Vec<Node>, Refusal> {
        let mut metadata = std::ptr::null();
        // SAFETY: the client is live; no topic is named; the answer is ours and destroyed when all
        // of it was copied.
        unsafe {
            let code = rd::rd_kafka_metadata(
                self.native(),
                0,
                std::ptr::null_mut(),
                &mut metadata,
                millis(within),
            );
            if code as i32 != 0 || metadata.is_null() {
                return Err(Refusal {
                    code: KafkaCode(code as i32),
                    text: text(rd::rd_kafka_err2str(code)),
                });
            }
            let count = usize::try_from((*metadata).broker_cnt).unwrap_or(0);
            let nodes = list((*metadata).brokers, count)
                .iter()
                .map(|broker| Node {
                    id: broker.id,
                    host: text(broker.host),
                    port: u16::try_from(broker.port).unwrap_or(0),
                })
                .collect();
            rd::rd_kafka_metadata_destroy(metadata);
            Ok(nodes)
        }
    }

    /// Partitions and rights of each topic; makes none.
    pub fn topics(&self, topics: &[CString], within: Duration) {
        let options = Options::new(
            self.client,
            rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS,
            within,
        );
        options.include_rights();
        let mut names: Vec<*const c_char> = topics.iter().map(|topic| topic.as_ptr()).collect();
        // SAFETY: as above; the collection copies the names and is destroyed here.
        unsafe {
            let names =
                rd::rd_kafka_TopicCollection_of_topic_names(names.as_mut_ptr(), names.len());
            rd::rd_kafka_DescribeTopics(
                self.native(),
                names,
                options.0.as_ptr(),
                self.queue.as_ptr(),
            );
            rd::rd_kafka_TopicCollection_destroy(names);
        }
    }

    /// Settings of each topic.
    pub fn configs(&self, topics: &[CString], within: Duration) {
        let options = Options::new(
            self.client,
            rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBECONFIGS,
            within,
        );
        let topic = rd::rd_kafka_ResourceType_t::RD_KAFKA_RESOURCE_TOPIC;
        // SAFETY: as above; the resources are copied by the call and destroyed here.
        unsafe {
            let mut resources: Vec<_> = topics
                .iter()
                .map(|name| rd::rd_kafka_ConfigResource_new(topic, name.as_ptr()))
                .collect();
            rd::rd_kafka_DescribeConfigs(
                self.native(),
                resources.as_mut_ptr(),
                resources.len(),
                options.0.as_ptr(),
                self.queue.as_ptr(),
            );
            rd::rd_kafka_ConfigResource_destroy_array(resources.as_mut_ptr(), resources.len());
        }
    }

    /// The next answer, if one comes in time. Blocks.
    pub fn next(&self, within: Duration) -> Option<Answer> {
        // SAFETY: the queue is live; the event is ours and destroyed when all of it was copied.
        unsafe {
            let event = rd::rd_kafka_queue_poll(self.queue.as_ptr(), millis(within));
            if event.is_null() {
                return None;
            }
            let answer = read(event);
            rd::rd_kafka_event_destroy(event);
            answer
        }
    }

    fn native(&self) -> *mut rd::rd_kafka_t {
        self.client.client().native_ptr()
    }
}

impl Drop for Questions<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is live and not used afterwards. An answer that is still to come is
        // thrown away by the library.
        unsafe { rd::rd_kafka_queue_destroy(self.queue.as_ptr()) }
    }
}

struct Options(NonNull<rd::rd_kafka_AdminOptions_t>);

impl Options {
    fn new(
        client: &BaseProducer<Inbox>,
        for_what: rd::rd_kafka_admin_op_t,
        within: Duration,
    ) -> Self {
        let mut words = [0; 128];
        // SAFETY: the client is live; the options are destroyed in `drop`; the buffer's length is
        // the one that is given. A time-out out of range leaves the default.
        unsafe {
            let options = rd::rd_kafka_AdminOptions_new(client.client().native_ptr(), for_what);
            let options = NonNull::new(options).expect("the operation is one that there is");
            rd::rd_kafka_AdminOptions_set_request_timeout(
                options.as_ptr(),
                millis(within).max(1),
                words.as_mut_ptr(),
                words.len(),
            );
            Options(options)
        }
    }

    fn include_rights(&self) {
        // SAFETY: the options are live; an error, which would only mean that rights are not told,
        // is ours to destroy.
        unsafe {
            let error =
                rd::rd_kafka_AdminOptions_set_include_authorized_operations(self.0.as_ptr(), 1);
            if !error.is_null() {
                rd::rd_kafka_error_destroy(error);
            }
        }
    }
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: the handle is live and not used afterwards.
        unsafe { rd::rd_kafka_AdminOptions_destroy(self.0.as_ptr()) }
    }
}

fn millis(duration: Duration) -> c_int {
    c_int::try_from(duration.as_millis()).unwrap_or(c_int::MAX)
}

/// # Safety
/// `event` is a live event.
unsafe fn read(event: *mut rd::rd_kafka_event_t) -> Option<Answer> {
    // SAFETY: each result is the live event itself, in the form that its type says.
    unsafe {
        let code = rd::rd_kafka_event_error(event) as i32;
        let refusal = (code != 0).then(|| Refusal {
            code: KafkaCode(code),
            text: text(rd::rd_kafka_event_error_string(event)),
        });
        let answer = match rd::rd_kafka_event_type(event) {
            rd::RD_KAFKA_EVENT_DESCRIBETOPICS_RESULT => Answer::Topics(match refusal {
                Some(refusal) => Err(refusal),
                None => Ok(described(rd::rd_kafka_event_DescribeTopics_result(event))),
            }),
            rd::RD_KAFKA_EVENT_DESCRIBECONFIGS_RESULT => Answer::Configs(match refusal {
                Some(refusal) => Err(refusal),
                None => Ok(configured(rd::rd_kafka_event_DescribeConfigs_result(event))),
            }),
            _ => return None,
        };
        Some(answer)
    }
}

/// # Safety
/// `result` is a live answer.
unsafe fn described(result: *const rd::rd_kafka_DescribeTopics_result_t) -> Each<Topic> {
    let mut count = 0;
    // SAFETY: topics and what hangs on them live as long as the answer.
    unsafe {
        let topics = rd::rd_kafka_DescribeTopics_result_topics(result, &mut count);
        list(topics, count)
            .iter()
            .filter(|topic| !topic.is_null())
            .map(|topic| {
                let name = text(rd::rd_kafka_TopicDescription_name(*topic));
                let error = rd::rd_kafka_TopicDescription_error(*topic);
                let code = rd::rd_kafka_error_code(error) as i32;
                if code != 0 {
                    let refusal = Refusal {
                        code: KafkaCode(code),
                        text: text(rd::rd_kafka_error_string(error)),
                    };
                    return (name, Err(refusal));
                }
                let topic = Topic {
                    partitions: partitions(*topic),
                    rights: rights(*topic),
                };
                (name, Ok(topic))
            })
            .collect()
    }
}

/// # Safety
/// `topic` is live.
unsafe fn partitions(topic: *const rd::rd_kafka_TopicDescription_t) -> Vec<Partition> {
    let (mut count, mut in_sync, mut replicas) = (0, 0, 0);
    // SAFETY: the partitions live as long as the topic; a leader may be none.
    unsafe {
        let partitions = rd::rd_kafka_TopicDescription_partitions(topic, &mut count);
        list(partitions, count)
            .iter()
            .map(|partition| {
                let leader = rd::rd_kafka_TopicPartitionInfo_leader(*partition);
                rd::rd_kafka_TopicPartitionInfo_isr(*partition, &mut in_sync);
                rd::rd_kafka_TopicPartitionInfo_replicas(*partition, &mut replicas);
                Partition {
                    id: rd::rd_kafka_TopicPartitionInfo_partition(*partition),
                    leader: (!leader.is_null()).then(|| rd::rd_kafka_Node_id(leader)),
                    replicas,
                    in_sync,
                }
            })
            .collect()
    }
}

/// # Safety
/// `topic` is live.
unsafe fn rights(topic: *const rd::rd_kafka_TopicDescription_t) -> Option<Rights> {
    let mut count = 0;
    // SAFETY: the operations live as long as the topic. They are read as the numbers that they
    // are: a broker may know more of them than this library.
    unsafe {
        let operations = rd::rd_kafka_TopicDescription_authorized_operations(topic, &mut count);
        let operations = list(operations.cast::<u32>(), count);
        if operations.is_empty() {
            return None;
        }
        let may = |operation: rd::rd_kafka_AclOperation_t| operations.contains(&(operation as u32));
        Some(Rights {
            write: may(rd::rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_WRITE),
            read: may(rd::rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_READ),
            describe_configs: may(
                rd::rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_DESCRIBE_CONFIGS,
            ),
        })
    }
}

/// # Safety
/// `result` is a live answer.
unsafe fn configured(result: *const rd::rd_kafka_DescribeConfigs_result_t) -> Each<TopicConfig> {
    let mut count = 0;
    // SAFETY: resources and their entries live as long as the answer.
    unsafe {
        let resources = rd::rd_kafka_DescribeConfigs_result_resources(result, &mut count);
        list(resources, count)
            .iter()
            .map(|resource| {
                let name = text(rd::rd_kafka_ConfigResource_name(*resource));
                let code = rd::rd_kafka_ConfigResource_error(*resource) as i32;
                if code != 0 {
                    let refusal = Refusal {
                        code: KafkaCode(code),
                        text: text(rd::rd_kafka_ConfigResource_error_string(*resource)),
                    };
                    return (name, Err(refusal));
                }
                let mut count = 0;
                let entries = rd::rd_kafka_ConfigResource_configs(*resource, &mut count);
                let config = list(entries, count)
                    .iter()
                    .map(|entry| {
                        (
                            text(rd::rd_kafka_ConfigEntry_name(*entry)),
                            text(rd::rd_kafka_ConfigEntry_value(*entry)),
                        )
                    })
                    .collect();
                (name, Ok(config))
            })
            .collect()
    }
}

/// # Safety
/// `first` is null, or points to `count` values that live as long as the result is used.
unsafe fn list<'a, T>(first: *const T, count: usize) -> &'a [T] {
    if first.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(first, count) }
}

/// # Safety
/// `words` is null, or a live C string.
unsafe fn text(words: *const c_char) -> String {
    if words.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(words) }
        .to_string_lossy()
        .into_owned()
}
