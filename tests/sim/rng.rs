//! Chance: splitmix64, so that a seed means the same run for ever.

#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `low..high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low).max(1)
    }

    /// In `low..high`, for counts.
    pub fn count(&mut self, low: usize, high: usize) -> usize {
        usize::try_from(self.range(low as u64, high as u64)).expect("below a usize")
    }

    /// True in `n` of 1,000 cases.
    pub fn permille(&mut self, n: u64) -> bool {
        self.next() % 1_000 < n
    }

    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.count(0, list.len())]
    }

    pub fn micros(&mut self, low: u64, high: u64) -> std::time::Duration {
        std::time::Duration::from_micros(self.range(low, high))
    }

    pub fn millis(&mut self, low: u64, high: u64) -> std::time::Duration {
        std::time::Duration::from_micros(self.range(low * 1_000, high * 1_000))
    }
}
