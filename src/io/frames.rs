//! The read buffer of the replication connection, and where in it the frames are.
//!
//! A frame of the Postgres protocol is a tag (1 byte), a length (4 bytes, itself included) and a
//! body. The buffer is one contiguous piece, so that a decoder may borrow a row's payload out of
//! it, and it is filled in gulps: whatever the socket has, up to the room that is left.
//!
//! # Invariants
//! - `start <= end <= buf.len()`; the bytes `start..end` were read and not yet taken.
//! - The buffer grows only after bytes: a frame that claims 60 MiB and sends ten costs nothing.
//! - Taking a frame moves no byte: a range that [`Frames::take`] returned is good until
//!   [`Frames::room`] is called.

use std::ops::Range;

/// 256 KiB: some 500 rows of half a kilobyte a gulp, and small enough to stay in the L2 cache.
pub const READ_BUFFER_BYTES: usize = 256 << 10;

/// The largest CopyData body that is taken. A row's text may be 1 GB; what is above this could
/// not be handed to Kafka either, and would break the promise of bounded memory.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// The largest body of any other frame: an error text, a row of `IDENTIFY_SYSTEM`.
pub const CONTROL_BYTES_MAX: usize = 1 << 20;

/// Tag and length.
pub const HEADER_BYTES: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {length} bytes (tag {tag:#04x}); at most {max} are taken")]
    TooLarge { tag: u8, length: usize, max: usize },
    #[error("a frame with the impossible length {length} (tag {tag:#04x})")]
    Malformed { tag: u8, length: u32 },
}

/// Which CopyData frames are legal now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Before the stream: every frame is small.
    Handshake,
    Streaming,
    /// We have said CopyDone: CopyData of any size is passed over unread, so that the server can
    /// come to read what we last said.
    Ending,
}

pub struct Frames {
    buf: Vec<u8>,
    start: usize,
    end: usize,
    phase: Phase,
    /// Bytes that are still to come of a frame that is passed over.
    skip: usize,
}

impl Default for Frames {
    fn default() -> Self {
        Frames {
            buf: vec![0; READ_BUFFER_BYTES],
            start: 0,
            end: 0,
            phase: Phase::Handshake,
            skip: 0,
        }
    }
}

impl Frames {
    pub fn enter(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Bytes read and not yet taken.
    pub fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// The bytes that are not taken.
    pub fn rest(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    /// Bytes held for reading.
    #[cfg(test)]
    fn capacity(&self) -> usize {
        self.buf.len()
    }

    /// Where the next whole frame lies, header included; it counts as taken. `None`: not all of
    /// it is here yet.
    ///
    /// # Errors
    /// The length is impossible or above the limit of its kind. The frame is not taken: the same
    /// error comes again.
    pub fn take(&mut self) -> Result<Option<Range<usize>>, FrameError> {
        let total = loop {
            self.pass_over();
            let Some(total) = self.first_frame_bytes()? else {
                return Ok(None);
            };
            if self.phase != Phase::Ending || self.buf[self.start] != b'd' {
                break total;
            }
            self.skip = total;
        };
        if self.buffered() < total {
            return Ok(None);
        }
        let frame = self.start..self.start + total;
        self.start = frame.end;
        Ok(Some(frame))
    }

    fn pass_over(&mut self) {
        let here = self.skip.min(self.buffered());
        self.start += here;
        self.skip -= here;
    }

    /// The bytes of a range that [`Frames::take`] returned.
    pub fn bytes(&self, frame: Range<usize>) -> &[u8] {
        &self.buf[frame]
    }

    /// The room to read into. Empty only while a whole frame waits to be taken.
    pub fn room(&mut self) -> &mut [u8] {
        let pending = self.buffered();
        // An illegal length is the next caller of `take` to report: no room is made for it.
        let want = self.first_frame_bytes().ok().flatten().unwrap_or(0);
        if self.buf.len() > READ_BUFFER_BYTES
            && want <= READ_BUFFER_BYTES
            && pending <= READ_BUFFER_BYTES / 2
        {
            self.reallocate(READ_BUFFER_BYTES);
        } else if self.start > 0 && (pending == 0 || self.buf.len() - self.end < self.buf.len() / 2)
        {
            // The caller takes every whole frame before it reads on, so that what is moved here
            // is the head of one frame, once a gulp.
            self.buf.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = pending;
        }
        if self.end == self.buf.len() && want > self.buf.len() {
            let whole = want.next_multiple_of(READ_BUFFER_BYTES);
            self.reallocate(whole.min(self.buf.len() * 2));
        }
        &mut self.buf[self.end..]
    }

    /// So many bytes were read into the room.
    pub fn filled(&mut self, bytes: usize) {
        self.end += bytes;
        assert!(
            self.end <= self.buf.len(),
            "more was read than there was room"
        );
    }

    /// Length of the first frame, header included; `None` while its header is not all here.
    fn first_frame_bytes(&self) -> Result<Option<usize>, FrameError> {
        let Some(header) = self.buf[self.start..self.end].first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let [tag, a, b, c, d] = *header;
        let length = u32::from_be_bytes([a, b, c, d]);
        let Some(body) = length.checked_sub(4) else {
            return Err(FrameError::Malformed { tag, length });
        };
        let max = match (self.phase, tag) {
            (Phase::Streaming, b'd') => FRAME_BYTES_MAX,
            (Phase::Ending, b'd') => usize::MAX,
            (Phase::Handshake | Phase::Streaming | Phase::Ending, _) => CONTROL_BYTES_MAX,
        };
        match usize::try_from(body) {
            Ok(length) if length <= max => Ok(Some(HEADER_BYTES + length)),
            Ok(length) => Err(FrameError::TooLarge { tag, length, max }),
            Err(_) => Err(FrameError::Malformed { tag, length }),
        }
    }

    /// A zeroed allocation is lazy: pages that no byte is read into cost nothing.
    fn reallocate(&mut self, bytes: usize) {
        let pending = self.buffered();
        let mut buf = vec![0; bytes];
        buf[..pending].copy_from_slice(&self.buf[self.start..self.end]);
        self.buf = buf;
        self.start = 0;
        self.end = pending;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(tag: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).expect("test bodies are small");
        let mut bytes = vec![tag];
        bytes.extend(length.to_be_bytes());
        bytes.extend(body);
        bytes
    }

    /// Feeds `bytes` in pieces of at most `piece`, taking every frame as soon as it is whole.
    fn feed(
        frames: &mut Frames,
        mut bytes: &[u8],
        piece: usize,
    ) -> Result<Vec<Vec<u8>>, FrameError> {
        let mut taken = Vec::new();
        while !bytes.is_empty() {
            let room = frames.room();
            assert!(!room.is_empty(), "every whole frame was taken");
            let n = room.len().min(piece).min(bytes.len());
            room[..n].copy_from_slice(&bytes[..n]);
            frames.filled(n);
            bytes = &bytes[n..];
            while let Some(range) = frames.take()? {
                taken.push(frames.bytes(range).to_vec());
            }
        }
        Ok(taken)
    }

    fn streaming() -> Frames {
        let mut frames = Frames::default();
        frames.enter(Phase::Streaming);
        frames
    }

    #[test]
    fn frames_come_out_whole_wherever_they_are_cut() {
        let wanted = [frame(b'd', b"row"), frame(b'S', b""), frame(b'd', &[7; 40])];
        let bytes = wanted.concat();
        for piece in 1..=bytes.len() {
            let taken = feed(&mut streaming(), &bytes, piece).expect("legal frames");
            assert_eq!(taken, wanted, "pieces of {piece}");
        }
    }

    #[test]
    fn a_large_frame_grows_the_buffer_and_a_small_one_shrinks_it() {
        let large = frame(b'd', &vec![1; 3 * READ_BUFFER_BYTES + 17]);
        let mut frames = streaming();
        let taken = feed(&mut frames, &large, usize::MAX).expect("a legal frame");
        assert_eq!(taken, [large]);
        assert_eq!(frames.capacity(), 4 * READ_BUFFER_BYTES);
        feed(&mut frames, &frame(b'd', b"x"), 3).expect("a legal frame");
        assert_eq!(frames.capacity(), READ_BUFFER_BYTES);
    }

    #[test]
    fn a_claimed_length_allocates_nothing() {
        let mut frames = streaming();
        let mut claim = vec![b'd'];
        claim.extend((60u32 << 20).to_be_bytes());
        assert_eq!(feed(&mut frames, &claim, 5), Ok(vec![]));
        frames.room();
        assert_eq!(frames.capacity(), READ_BUFFER_BYTES);
    }

    #[test]
    fn a_frame_above_the_limit_is_an_error_that_stays() {
        let mut frames = streaming();
        let mut claim = vec![b'd'];
        claim.extend((65u32 << 20).to_be_bytes());
        let error = feed(&mut frames, &claim, 5);
        let length = (65 << 20) - 4;
        let wanted = FrameError::TooLarge {
            tag: b'd',
            length,
            max: FRAME_BYTES_MAX,
        };
        assert_eq!(error, Err(wanted));
        assert_eq!(frames.take(), Err(wanted));
    }

    #[test]
    fn at_the_end_copy_data_of_any_size_is_passed_over_in_no_more_room() {
        let mut frames = streaming();
        let huge = frame(b'd', &vec![1; FRAME_BYTES_MAX + 1]);
        let (head, tail) = huge.split_at(1000);
        assert!(feed(&mut frames, head, usize::MAX).is_err());
        frames.enter(Phase::Ending);
        assert_eq!(frames.take(), Ok(None));
        let last = frame(b'C', b"COPY 0");
        let rest = [tail, &frame(b'd', b"small"), &last].concat();
        assert_eq!(feed(&mut frames, &rest, 70_000), Ok(vec![last]));
        assert_eq!(frames.capacity(), READ_BUFFER_BYTES);
    }

    #[test]
    fn before_the_stream_every_frame_is_small() {
        let mut claim = vec![b'd'];
        claim.extend((2u32 << 20).to_be_bytes());
        assert!(feed(&mut Frames::default(), &claim, 5).is_err());
        assert!(feed(&mut streaming(), &claim, 5).is_ok());
        claim[0] = b'E';
        assert!(feed(&mut streaming(), &claim, 5).is_err());
    }

    #[test]
    fn a_length_below_four_is_malformed() {
        let error = feed(&mut streaming(), &[b'd', 0, 0, 0, 3], 5);
        let wanted = FrameError::Malformed {
            tag: b'd',
            length: 3,
        };
        assert_eq!(error, Err(wanted));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_nor_allocate_beyond_what_came(
            bytes in prop::collection::vec(any::<u8>(), 0..4096),
            piece in 1usize..600,
        ) {
            let mut frames = streaming();
            let _ = feed(&mut frames, &bytes, piece);
            prop_assert_eq!(frames.capacity(), READ_BUFFER_BYTES);
        }

        #[test]
        fn any_frames_in_any_pieces_come_out_as_they_went_in(
            sizes in prop::collection::vec(0usize..700_000, 1..6),
            piece in 1usize..400_000,
        ) {
            let wanted: Vec<_> = sizes.iter().map(|n| frame(b'd', &vec![b'p'; *n])).collect();
            let mut frames = streaming();
            let taken = feed(&mut frames, &wanted.concat(), piece);
            prop_assert_eq!(taken, Ok(wanted));
            let largest = sizes.iter().max().copied().unwrap_or(0) + HEADER_BYTES;
            prop_assert!(frames.capacity() <= largest.next_multiple_of(READ_BUFFER_BYTES));
        }
    }
}
