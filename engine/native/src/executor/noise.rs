//! Random numbers that depend on (seed, position, token id) only. The same hash as the torch sampler's
//! `noise.py`: both executors draw alike from alike logits.

/// splitmix64's finaliser.
fn finish(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// The two keys of one draw.
#[derive(Clone, Copy)]
pub(super) struct Keys(u32, u32);

impl Keys {
    pub(super) fn new(seed: u64, position: u64) -> Self {
        let mixed = finish(finish(seed).wrapping_add(position.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        Self(mixed as u32, (mixed >> 32) as u32)
    }

    /// 32 uniform bits, as a number in 2^-33..=1 - 2^-24. Small numbers make large noise.
    #[inline(always)]
    pub(super) fn uniform(self, id: u32) -> f32 {
        let bits = mix(mix(id ^ self.0).wrapping_add(self.1)) as i32;
        ((bits as f32 + (2_147_483_648.0 + 0.5)) * 2.328_306_4e-10)
            .clamp(1.164_153_2e-10, 1.0 - 5.960_464_5e-8)
    }
}

/// A 32-bit finaliser (lowbias32).
#[inline(always)]
fn mix(bits: u32) -> u32 {
    let bits = (bits ^ (bits >> 16)).wrapping_mul(0x7FEB_352D);
    let bits = (bits ^ (bits >> 15)).wrapping_mul(0x846C_A68B);
    bits ^ (bits >> 16)
}

/// Standard Gumbel noise of a uniform number.
pub(super) fn gumbel(uniform: f32) -> f32 {
    -(-(-uniform).ln_1p()).ln()
}

/// An upper bound of `gumbel`, from the exponent alone: -ln(-ln(1 - v)) <= -ln(v) <= -ln(2^exponent).
#[inline(always)]
pub(super) fn bound(uniform: f32) -> f32 {
    (127 - (uniform.to_bits() >> 23) as i32) as f32 * std::f32::consts::LN_2 + 1e-4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_never_below_the_noise() {
        let keys = Keys::new(7, 3);
        for id in 0..100_000 {
            let uniform = keys.uniform(id);
            assert!(bound(uniform) >= gumbel(uniform), "{uniform}");
        }
    }

    #[test]
    fn noise_has_the_mean_of_a_gumbel_and_is_finite() {
        let keys = Keys::new(u64::MAX, 12);
        let all: Vec<f32> = (0..200_000).map(|id| gumbel(keys.uniform(id))).collect();
        assert!(all.iter().all(|noise| noise.is_finite()));
        let mean = all.iter().sum::<f32>() / all.len() as f32;
        assert!((mean - 0.5772).abs() < 0.02, "{mean}");
    }
}
