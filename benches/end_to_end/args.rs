//! What can be asked for.

const USAGE: &str =
    "usage: cargo bench --bench end_to_end -- [--quick] [--rounds N] [--only NAME]...
  --quick      small amounts, one round: does it work at all (no exit code for missed limits)
  --rounds N   repeat each measurement, the median counts [default: 3]
  --only NAME  drain, drain-single, drain-unix, paired, paired-mapping, paired-tls,
               memory, latency, sustained, restart, idle, poison, poison-none,
               poison-neighbours or parked";

const NAMES: [&str; 15] = [
    "drain",
    "drain-single",
    "drain-unix",
    "paired",
    "paired-mapping",
    "paired-tls",
    "memory",
    "latency",
    "sustained",
    "restart",
    "idle",
    "poison",
    "poison-none",
    "poison-neighbours",
    "parked",
];

pub struct Args {
    pub quick: bool,
    pub rounds: usize,
    only: Vec<String>,
}

impl Args {
    pub fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
        let (mut quick, mut rounds, mut only) = (false, None, Vec::new());
        while let Some(word) = words.next() {
            match word.as_str() {
                // `cargo bench` adds this one.
                "--bench" => {}
                "--quick" => quick = true,
                "--rounds" => {
                    let n = words.next().and_then(|n| n.parse().ok());
                    rounds = Some(n.filter(|n| *n > 0).ok_or(USAGE)?);
                }
                "--only" => {
                    let name = words.next().filter(|n| NAMES.contains(&n.as_str()));
                    only.push(name.ok_or(USAGE)?);
                }
                _ => return Err(USAGE.to_owned()),
            }
        }
        Ok(Args {
            quick,
            rounds: rounds.unwrap_or(if quick { 1 } else { 3 }),
            only,
        })
    }

    /// A part is wanted when it, or a part of it, was asked for.
    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty()
            || self
                .only
                .iter()
                .any(|only| only == name || only.starts_with(&format!("{name}-")))
    }

    /// One of the parts of a part.
    pub fn wants_exactly(&self, name: &str) -> bool {
        let whole = name.split('-').next().unwrap_or(name);
        self.only.is_empty() || self.only.iter().any(|only| only == name || only == whole)
    }

    /// `full`, or `small` with `--quick`.
    pub fn pick<T>(&self, full: T, small: T) -> T {
        if self.quick { small } else { full }
    }
}
