//! Random numbers by counter: number `i` of a stream can be had without those before it.

use half::bf16;

/// How the values of a tensor are spread.
#[derive(Clone, Copy, Debug)]
pub(super) enum Distribution {
    /// Scales for codes of so many bits and weights of so much deviation; a random half is negative.
    Scales { bits: usize, deviation: f32 },
    /// The biases that go with [`Distribution::Scales`]: weights are centred on zero.
    Biases { bits: usize, deviation: f32 },
    /// Around `mean`, roughly normal.
    Normal { mean: f32, deviation: f32 },
    /// Logarithms of numbers spread evenly over a range.
    LogUniform { low: f64, high: f64 },
    /// What softplus turns into numbers spread evenly in logarithm over a range.
    InverseSoftplus { low: f64, high: f64 },
}

/// Random numbers of one tensor.
pub(super) struct Stream {
    key: u64,
}

/// Steps of the counter: 2^64 divided by the golden ratio, as in SplitMix64.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix64.
#[inline(always)]
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

impl Stream {
    /// The stream of a seed and a tensor's name.
    pub fn new(seed: u64, name: &str) -> Self {
        let key = name.bytes().fold(mix(seed.wrapping_add(STEP)), |key, byte| mix(key ^ u64::from(byte)));
        Self { key }
    }

    #[inline(always)]
    fn bits(&self, i: u64) -> u64 {
        mix(self.key.wrapping_add(STEP.wrapping_mul(i + 1)))
    }

    /// Fills a buffer with random bits.
    pub fn fill_bits(&self, out: &mut [u8]) {
        let (words, rest) = out.as_chunks_mut::<8>();
        for (i, word) in words.iter_mut().enumerate() {
            *word = self.bits(i as u64).to_le_bytes();
        }
        let last = self.bits(words.len() as u64).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// From 0 to 1.
    fn uniform(&self, i: u64) -> f64 {
        (self.bits(i) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Mean 0, deviation 1, within ±3.5: the sum of four uniform numbers, so that no system's logarithm matters.
    fn normal(&self, i: u64) -> f32 {
        let bits = self.bits(i);
        let sum: u64 = (0..4).map(|k| bits >> (16 * k) & 0xFFFF).sum();
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }

    /// A scale for codes of so many bits: its codes spread evenly over `2^bits` steps, so their deviation is
    /// `2^bits / sqrt(12)` steps. Groups differ in sign, and in size by up to a
    /// quarter.
    fn scale(&self, i: u64, bits: usize, deviation: f32) -> f32 {
        let random = self.bits(i);
        let size = 0.75 + (random >> 32) as f32 / u32::MAX as f32 / 2.0;
        let sign = if random & 1 == 0 { 1.0 } else { -1.0 };
        sign * size * deviation * 12f32.sqrt() / (1 << bits) as f32
    }
}

impl Distribution {
    /// Value `i` of a tensor.
    pub fn at(self, stream: &Stream, i: u64) -> f32 {
        match self {
            Self::Scales { bits, deviation } => stream.scale(i, bits, deviation),
            Self::Biases { bits, deviation } => {
                // Less the middle code, in units of the scale as it is stored.
                let scale = bf16::from_f32(stream.scale(i, bits, deviation)).to_f32();
                -scale * ((1 << bits) - 1) as f32 / 2.0
            }
            Self::Normal { mean, deviation } => mean + deviation * stream.normal(i),
            Self::LogUniform { low, high } => (low + (high - low) * stream.uniform(i)).ln() as f32,
            Self::InverseSoftplus { low, high } => {
                let x = (low.ln() + (high / low).ln() * stream.uniform(i)).exp();
                (x + (-(-x).exp_m1()).ln()) as f32
            }
        }
    }
}
