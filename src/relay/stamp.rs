//! A column's value as a record's timestamp: milliseconds since 1970, rounded down.
//!
//! # Invariants
//! Only what Postgres prints under DateStyle ISO is read; all else, and every time that is none
//! (infinity), is `None`, never a guess.

/// How a timestamp column is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `timestamptz`, `timestamp` (taken as UTC), `date`: as printed.
    Printed,
    /// `bigint`: milliseconds since 1970.
    Millis,
}

const MILLIS_A_DAY: i128 = 86_400_000;

/// Milliseconds since 1970, where Kafka can hold them.
#[must_use]
pub fn millis(kind: Kind, text: &[u8]) -> Option<i64> {
    let millis = match kind {
        Kind::Printed => printed(text)?,
        Kind::Millis => std::str::from_utf8(text).ok()?.parse().ok()?,
    };
    // A negative one is the protocol's word for none.
    (millis >= 0).then_some(millis)
}

/// `2026-03-29 01:30:00.123456+00`, `2026-03-29`, `0044-03-15 12:00:00+00:19:32 BC`.
fn printed(text: &[u8]) -> Option<i64> {
    let (text, is_bc) = match text.strip_suffix(b" BC") {
        Some(text) => (text, true),
        None => (text, false),
    };
    let mut cursor = Cursor { text };
    let written_year = cursor.number(4, 7)?;
    // There is no year 0: 1 BC comes before 1 AD.
    let year = if is_bc {
        1 - written_year
    } else {
        written_year
    };
    cursor.expect(b'-')?;
    let month = cursor.number(2, 2)?;
    cursor.expect(b'-')?;
    let day = cursor.number(2, 2)?;
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let mut micros = i128::from(days(year, month, day)) * MILLIS_A_DAY * 1_000;
    if cursor.expect(b' ').is_some() {
        micros += i128::from(cursor.time()?) * 1_000_000;
        if cursor.expect(b'.').is_some() {
            micros += i128::from(cursor.fraction()?);
        }
        micros -= i128::from(cursor.offset()?) * 1_000_000;
    }
    if !cursor.text.is_empty() {
        return None;
    }
    i64::try_from(micros.div_euclid(1_000)).ok()
}

struct Cursor<'a> {
    text: &'a [u8],
}

impl Cursor<'_> {
    fn expect(&mut self, byte: u8) -> Option<()> {
        self.text = self.text.strip_prefix(&[byte])?;
        Some(())
    }

    /// A number of so many digits.
    fn number(&mut self, min: usize, max: usize) -> Option<i64> {
        let digits = self
            .text
            .iter()
            .take(max)
            .take_while(|b| b.is_ascii_digit())
            .count();
        if digits < min {
            return None;
        }
        let (number, rest) = self.text.split_at(digits);
        self.text = rest;
        let add = |sum, digit: &u8| sum * 10 + i64::from(digit - b'0');
        Some(number.iter().fold(0, add))
    }

    /// `hh:mm:ss`, in seconds.
    fn time(&mut self) -> Option<i64> {
        let hours = self.number(2, 2)?;
        self.expect(b':')?;
        let minutes = self.number(2, 2)?;
        self.expect(b':')?;
        let seconds = self.number(2, 2)?;
        Some(hours * 3_600 + minutes * 60 + seconds)
    }

    /// What follows the point, in microseconds: Postgres prints no trailing zeros.
    fn fraction(&mut self) -> Option<i64> {
        let before = self.text.len();
        let number = self.number(1, 6)?;
        let missing = 6 - u32::try_from(before - self.text.len()).ok()?;
        Some(number * 10_i64.pow(missing))
    }

    /// `+hh`, `-hh:mm`, `+hh:mm:ss` or nothing, in seconds east of Greenwich.
    fn offset(&mut self) -> Option<i64> {
        let sign = match self.text.first() {
            Some(b'+') => 1,
            Some(b'-') => -1,
            Some(_) => return None,
            None => return Some(0),
        };
        self.text = &self.text[1..];
        let mut seconds = self.number(2, 2)? * 3_600;
        for unit in [60, 1] {
            if self.expect(b':').is_none() {
                break;
            }
            seconds += self.number(2, 2)? * unit;
        }
        Some(sign * seconds)
    }
}

/// Days since 1970-01-01 in the Gregorian calendar, which Postgres uses for all of time (Howard
/// Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn days(year: i64, month: i64, day: i64) -> i64 {
    // Years begin in March: the day that comes and goes is their last.
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The right-hand sides are Postgres 18's: `floor(extract(epoch from …) * 1000)`.
    #[test]
    fn what_postgres_prints_is_read_to_the_millisecond() {
        let right = [
            ("1970-01-01 00:00:00+00", 0),
            ("1970-01-01 00:00:00", 0),
            ("1970-01-01", 0),
            ("2026-03-29 01:30:00.123456+00", 1_774_747_800_123),
            ("2026-03-29 01:30:00.1+00", 1_774_747_800_100),
            ("2026-03-29 01:30:00.000999+00", 1_774_747_800_000),
            ("2026-03-29 07:00:00.123456+05:30", 1_774_747_800_123),
            ("2026-03-28 21:30:00-04", 1_774_747_800_000),
            ("1900-01-01 00:19:32+00:19:32", -2_208_988_800_000),
            ("2000-02-29", 951_782_400_000),
            ("1969-12-31 23:59:59.999999+00", -1),
            ("1969-12-31 23:59:59.999+00", -1),
            ("1969-12-31 23:59:59.998999+00", -2),
            ("0001-01-01", -62_135_596_800_000),
            ("0001-12-31 BC", -62_135_683_200_000),
            ("0044-03-15 12:00:00+00 BC", -63_517_780_800_000),
            ("4714-11-24 BC", -210_866_803_200_000),
            ("10000-01-01 00:00:00+00", 253_402_300_800_000),
            ("294276-12-31 23:59:59.999999+00", 9_224_318_015_999_999),
            ("5874897-12-31", 185_331_706_992_000_000),
        ];
        for (text, millis) in right {
            assert_eq!(printed(text.as_bytes()), Some(millis), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_none() {
        for text in [
            "infinity",
            "-infinity",
            "",
            "2026-03-29T01:30:00Z",
            "29/03/2026 07:00:00 IST",
            "2026-03-29 01:30:00 IST",
            "2026-13-01",
            "2026-03-29 01:30",
            "2026-03-29 01:30:00.",
            "2026-03-29 01:30:00+",
            "26-03-29",
        ] {
            assert_eq!(printed(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn what_kafka_cannot_hold_is_none() {
        assert_eq!(
            millis(Kind::Printed, b"1969-12-31 23:59:59.999999+00"),
            None
        );
        assert_eq!(millis(Kind::Millis, b"-1"), None);
        assert_eq!(
            millis(Kind::Millis, b"1774747800123"),
            Some(1_774_747_800_123)
        );
        assert_eq!(millis(Kind::Millis, b"9223372036854775807"), Some(i64::MAX));
        assert_eq!(millis(Kind::Millis, b"2026-03-29"), None);
    }
}
