//! Bytes to messages and back. Pure: no sockets, no clock, no logging.

pub mod compose;
pub mod pgoutput;
pub mod replication;

/// Bytes that are not what the protocol says they are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("message ends early: at offset {at} it needs {want} more bytes and has {have}")]
    Truncated { at: usize, want: usize, have: usize },
    #[error("unknown message type {tag:#04x} at offset {at}")]
    UnknownTag { at: usize, tag: u8 },
    #[error("at offset {at}: {what}")]
    Malformed { at: usize, what: &'static str },
    /// A slot made with `two_phase = true` sends transactions before they are committed.
    #[error(
        "the slot sends prepared transactions (message type {tag:#04x}): it was made with two_phase = true"
    )]
    TwoPhase { tag: u8 },
}

/// Reads big-endian fields off a message and knows where it stands.
pub(crate) struct Reader<'a> {
    whole: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(whole: &'a [u8]) -> Self {
        Reader { whole, at: 0 }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        &self.whole[self.at..]
    }

    pub(crate) fn bytes(&mut self, want: usize) -> Result<&'a [u8], DecodeError> {
        let have = self.whole.len() - self.at;
        if have < want {
            return Err(DecodeError::Truncated {
                at: self.at,
                want: want - have,
                have,
            });
        }
        let bytes = &self.whole[self.at..self.at + want];
        self.at += want;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let bytes = self.bytes(N)?;
        Ok(bytes.try_into().expect("bytes() returned N bytes"))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn i16(&mut self) -> Result<i16, DecodeError> {
        Ok(i16::from_be_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(crate) fn i32(&mut self) -> Result<i32, DecodeError> {
        Ok(i32::from_be_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    pub(crate) fn i64(&mut self) -> Result<i64, DecodeError> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    /// A string up to its NUL, the NUL consumed and not returned.
    pub(crate) fn cstr(&mut self) -> Result<&'a [u8], DecodeError> {
        let rest = self.rest();
        let Some(end) = rest.iter().position(|b| *b == 0) else {
            return Err(DecodeError::Truncated {
                at: self.at,
                want: rest.len() + 1,
                have: rest.len(),
            });
        };
        self.at += end + 1;
        Ok(&rest[..end])
    }
}
