//! 16-bit floats in plain Rust, for packing and for CPUs without conversions.

/// The value of an IEEE half.
pub(crate) fn from_f16(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let exponent = u32::from(bits >> 10) & 31;
    let fraction = u32::from(bits & 0x3ff);
    let magnitude = match exponent {
        0 => return f32::from_bits((fraction as f32 * 5.960_464_5e-8).to_bits() | sign),
        31 => 0x7f80_0000 | (fraction << 13),
        _ => ((exponent + 112) << 23) | (fraction << 13),
    };
    f32::from_bits(sign | magnitude)
}

/// The nearest IEEE half, ties to even; too large a value becomes infinite.
pub(crate) fn to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    if magnitude < 0x3880_0000 {
        // Subnormal: counted in units of 2^-24. The product is exact, so one rounding remains.
        let units = f32::from_bits(magnitude) * 16_777_216.0;
        let floor = units as u32;
        let rest = units - floor as f32;
        let up = rest > 0.5 || (rest == 0.5 && floor & 1 == 1);
        return sign | (floor + u32::from(up)) as u16;
    }
    let rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    sign | ((rounded - 0x3800_0000) >> 13) as u16
}

/// The value of a bfloat16.
pub(crate) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bfloat16, ties to even.
pub(crate) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return ((bits >> 16) | 0x40) as u16;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = from_f16(bits);
            if !value.is_nan() {
                assert_eq!(to_f16(value), bits, "{value}");
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_even() {
        assert_eq!(from_f16(to_f16(1.0 + 2f32.powi(-11))), 1.0);
        assert_eq!(from_f16(to_f16(1.0 + 3.0 * 2f32.powi(-11))), 1.0 + 2f32.powi(-9));
        assert_eq!(to_f16(65520.0), 0x7c00);
        assert_eq!(to_f16(65519.0), 0x7bff);
        assert_eq!(to_bf16(1.0 + 2f32.powi(-8)), to_bf16(1.0));
    }
}
