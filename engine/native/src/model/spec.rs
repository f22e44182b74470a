//! Shape and constants of a decoder-only model, and its rotary frequencies.

/// How rotary frequencies differ from theta^(-2i/d); see `RopeScaling` of the Python package.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scaling {
    None,
    Linear {
        factor: f32,
    },
    Llama3 {
        factor: f32,
        low: f32,
        high: f32,
        context: f32,
    },
    /// Each frequency divided by its own number; head_dim / 2 of them.
    Factors(Vec<f32>),
}

/// Everything about a model that is not a weight.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) intermediate: usize,
    pub(crate) vocab: usize,
    pub(crate) eps: f32,
    pub(crate) theta: f32,
    pub(crate) scaling: Scaling,
    pub(crate) qk_norm: bool,
    /// Last positions that a token may attend to, itself included; usize::MAX for all.
    pub(crate) window: usize,
}

impl Spec {
    /// Rotary frequencies of the pairs of a head, in the f32 arithmetic of the reference implementation.
    pub(crate) fn frequencies(&self) -> Vec<f32> {
        let half = self.head_dim / 2;
        (0..half)
            .map(|i| {
                let exponent = (2 * i) as f32 / self.head_dim as f32;
                self.scale(i, 1.0 / self.theta.powf(exponent))
            })
            .collect()
    }

    fn scale(&self, i: usize, frequency: f32) -> f32 {
        match &self.scaling {
            Scaling::None => frequency,
            Scaling::Linear { factor } => frequency / factor,
            Scaling::Factors(factors) => frequency / factors[i],
            &Scaling::Llama3 { factor, low, high, context } => {
                let length = 2.0 * std::f32::consts::PI / frequency;
                if length < context / high {
                    frequency
                } else if length > context / low {
                    frequency / factor
                } else {
                    let smooth = (context / length - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(scaling: Scaling) -> Spec {
        Spec {
            hidden: 64,
            layers: 1,
            heads: 1,
            kv_heads: 1,
            head_dim: 64,
            intermediate: 64,
            vocab: 32,
            eps: 1e-5,
            theta: 500_000.0,
            scaling,
            qk_norm: false,
            window: usize::MAX,
        }
    }

    #[test]
    fn llama3_scaling_keeps_high_and_divides_low_frequencies() {
        let plain = spec(Scaling::None).frequencies();
        let scaled =
            spec(Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 8192.0 }).frequencies();
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[31], plain[31] / 8.0);
        assert!(scaled.iter().zip(&plain).all(|(s, p)| *s <= *p && *s >= p / 8.0 * 0.999));
        assert!(scaled.iter().zip(&plain).any(|(s, p)| *s < *p && *s > p / 8.0 * 1.01));
    }

    #[test]
    fn linear_and_stored_factors_divide() {
        let plain = spec(Scaling::None).frequencies();
        assert_eq!(spec(Scaling::Linear { factor: 4.0 }).frequencies()[3], plain[3] / 4.0);
        let factors: Vec<f32> = (1..=32).map(|i| i as f32).collect();
        assert_eq!(spec(Scaling::Factors(factors)).frequencies()[5], plain[5] / 6.0);
    }
}
