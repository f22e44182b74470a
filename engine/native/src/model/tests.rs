//! Products and whole models against double-precision arithmetic, on every instruction set here.

use proptest::prelude::*;

use super::acts::{Acts, ActsView};
use super::ggml::{self, Format};
use super::linear::{Hands, Linear, Local, gated};
use super::weight::{Packed, Stored, WeightType};
use crate::kernels::half::to_f16;
use crate::kernels::{Isa, Kernels, Threads};

const FORMATS: [Format; 8] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q8_0,
    Format::Q4K,
    Format::Q6K,
];

fn random(state: &mut u64) -> u8 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as u8
}

fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| f32::from(random(&mut state)) / 128.0 - 1.0 + f32::from(random(&mut state)) / 65536.0)
        .collect()
}

/// Valid bytes of `rows` rows: random codes with sober scales.
fn bytes(format: Format, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let (values, size) = format.block();
    let mut out = Vec::new();
    for _ in 0..rows * cols / values {
        let mut block: Vec<u8> = (0..size).map(|_| random(&mut state)).collect();
        let scale = to_f16(0.001 + f32::from(random(&mut state)) * 1e-5).to_le_bytes();
        match format {
            Format::F32 => block = (f32::from(random(&mut state)) / 128.0 - 1.0).to_le_bytes().to_vec(),
            Format::F16 => block = to_f16(f32::from(random(&mut state)) / 128.0 - 1.0).to_le_bytes().to_vec(),
            Format::Bf16 => block[1] = block[1] & 0x83 | 0x3c,
            Format::Q6K => block[208..].copy_from_slice(&scale),
            Format::Q4_1 | Format::Q4K => {
                block[..2].copy_from_slice(&scale);
                block[2..4].copy_from_slice(&scale);
            }
            Format::Q4_0 | Format::Q8_0 => block[..2].copy_from_slice(&scale),
        }
        out.extend(block);
    }
    out
}

/// Activations as an integer product sees them: 8 bits a block of 32, one that dwarfs its block apart.
fn quantised(x: &[f32]) -> Vec<f64> {
    x.chunks(32)
        .flat_map(|block| {
            let place = (0..32).max_by(|&a, &b| block[a].abs().total_cmp(&block[b].abs())).unwrap_or(0);
            let energy: f32 = (0..32).filter(|&i| i != place).map(|i| block[i] * block[i]).sum();
            let apart = (block[place] * block[place] > 144.0 / 31.0 * energy).then_some(place);
            let top = (0..32).filter(|&i| Some(i) != apart).fold(0.0f32, |top, i| top.max(block[i].abs()));
            let inverse = if top > 0.0 { 127.0 / top } else { 0.0 };
            let code = move |v: f32| f64::from((v * inverse).round_ties_even()) * f64::from(top / 127.0);
            (0..32)
                .map(move |i| if Some(i) == apart { f64::from(block[i]) } else { code(block[i]) })
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Noise in which some blocks have one value that dwarfs the others.
fn spiked(count: usize, seed: u64) -> Vec<f32> {
    let mut x = noise(count, seed);
    let mut state = seed ^ 5;
    for block in x.chunks_mut(32) {
        let (chance, place) = (random(&mut state), random(&mut state) as usize % block.len());
        if chance < 80 {
            block[place] = (f32::from(chance) - 40.5) * 50.0;
        }
    }
    x
}

fn kernels() -> impl Iterator<Item = Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::of)
}

/// The rows of `x` as `linear` reads them.
fn put(kernels: Kernels, acts: &mut Acts, linear: &Linear, x: &[f32], rows: usize, cols: usize) -> ActsView {
    let view = acts.shape(rows, cols, kernels.tile, linear.form());
    for row in 0..rows {
        let (tile, place) = view.locate(row);
        // SAFETY: the row holds `cols` values and nobody else writes.
        unsafe {
            view.put(&kernels, &view.tile(tile), place, 0, x[row * cols..].as_ptr(), cols);
            view.settle(row);
        };
    }
    view
}

fn product(
    kernels: Kernels,
    linear: &Linear,
    x: &[f32],
    rows: usize,
    cols: usize,
    threads: usize,
) -> Vec<f32> {
    let mut threads = Threads::new(threads).expect("threads start");
    let mut locals: Vec<Local> = (0..threads.threads()).map(|_| Local::new()).collect();
    let mut acts = Acts::default();
    let view = put(kernels, &mut acts, linear, x, rows, cols);
    let mut out = vec![f32::NAN; rows * linear.width()];
    linear.run(&mut Hands { kernels, threads: &mut threads, locals: &mut locals }, view, &mut out, false);
    out
}

/// K formats round the products of two scales to f16, one part in 2048, of a weight's two parts each: these may be twice
/// as large as any weight of the block, whose sum they are.
fn rounded_scales(format: Format, input: &[f64], weights: &[f32]) -> f64 {
    if !matches!(format, Format::Q4K | Format::Q6K) {
        return 0.0;
    }
    let blocks = input.chunks(32).zip(weights.chunks(32));
    blocks
        .map(|(input, weights)| {
            let most = weights.iter().fold(0.0f64, |most, weight| most.max(f64::from(weight.abs())));
            2.0 * most * input.iter().map(|value| value.abs()).sum::<f64>()
        })
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn products_equal_plain_arithmetic_and_do_not_depend_on_rows_beside(
        format in prop::sample::select(FORMATS.to_vec()),
        outputs in 1usize..100,
        blocks in 1usize..4,
        rows in 1usize..40,
        threads in 1usize..4,
        seed in any::<u64>(),
    ) {
        let cols = 256 * blocks;
        let data = bytes(format, outputs, cols, seed);
        let stored = Stored { format, rows: outputs, cols, bytes: &data, interleaved_heads: 0 };
        let linear = Linear::new(vec![Packed::pack(&stored, WeightType::Stored)]);
        let x = spiked(rows * cols, seed ^ 7);
        let mut weights = vec![0.0f32; outputs * cols];
        for (row, values) in weights.chunks_mut(cols).enumerate() {
            stored.values(row, values);
        }
        for kernels in kernels() {
            let out = product(kernels, &linear, &x, rows, cols, threads);
            for row in 0..rows {
                let input = &x[row * cols..][..cols];
                let exact = if linear.form().integer { quantised(input) } else { input.iter().map(|&v| f64::from(v)).collect() };
                let found = &out[row * linear.width()..][..outputs];
                for (n, value) in found.iter().enumerate() {
                    let own = &weights[n * cols..][..cols];
                    let terms = exact.iter().zip(own).map(|(a, w)| a * f64::from(*w));
                    let (sum, size) = terms.fold((0.0, 0.0), |(s, t), term| (s + term, t + term.abs()));
                    let size = size + rounded_scales(format, &exact, own);
                    prop_assert!((f64::from(*value) - sum).abs() <= size * 6e-4 + 1e-6, "{format:?} {value} {sum}");
                }
                let alone = product(kernels, &linear, input, 1, cols, 1);
                prop_assert_eq!(&alone[..outputs], found);
            }
        }
    }

    #[test]
    fn gated_rows_keep_their_spikes_whatever_stands_beside(rows in 1usize..30, seed in any::<u64>()) {
        let (inner, cols) = (256, 64);
        let make = |seed, rows, cols| {
            let data = bytes(Format::Q8_0, rows, cols, seed);
            Packed::pack(&Stored { format: Format::Q8_0, rows, cols, bytes: &data, interleaved_heads: 0 }, WeightType::Stored)
        };
        let (gate, up) = (make(seed, inner, cols), make(seed ^ 3, inner, cols));
        let (gate_linear, up_linear) = (Linear::new(vec![make(seed, inner, cols)]), Linear::new(vec![make(seed ^ 3, inner, cols)]));
        let down = Linear::new(vec![make(seed ^ 4, 48, inner)]);
        let x = spiked(rows * cols, seed ^ 9);
        for kernels in kernels() {
            let mut threads = Threads::new(2).expect("threads start");
            let mut locals = vec![Local::new(), Local::new()];
            let (mut acts, mut next) = (Acts::default(), Acts::default());
            let view = put(kernels, &mut acts, &gate_linear, &x, rows, cols);
            let to = next.shape(rows, inner, kernels.tile, down.form());
            let mut hands = Hands { kernels, threads: &mut threads, locals: &mut locals };
            gated(&mut hands, (&gate, &up), view, to);
            let mut found = vec![f32::NAN; rows * 48];
            down.run(&mut hands, to, &mut found, false);
            let mut g = product(kernels, &gate_linear, &x, rows, cols, 1);
            let u = product(kernels, &up_linear, &x, rows, cols, 1);
            // SAFETY: all three hold rows * inner values, a multiple of 16.
            unsafe { (kernels.gate)(g.as_ptr(), u.as_ptr(), rows * inner, g.as_mut_ptr()) };
            prop_assert_eq!(found, product(kernels, &down, &g, rows, inner, 1));
        }
    }

    #[test]
    fn packed_rows_read_back_as_stored(
        format in prop::sample::select(FORMATS.to_vec()), rows in 1usize..40, seed in any::<u64>(),
    ) {
        let data = bytes(format, rows, 512, seed);
        let stored = Stored { format, rows, cols: 512, bytes: &data, interleaved_heads: 0 };
        let packed = Packed::pack(&stored, WeightType::Stored);
        let (mut found, mut expected) = (vec![0.0f32; 512], vec![0.0f32; 512]);
        for row in 0..rows {
            packed.row(row, &mut found);
            stored.values(row, &mut expected);
            // K formats round scale and minimum to f16, which shows where the two nearly cancel.
            let bound = expected.iter().fold(0.0f32, |top, value| top.max(value.abs())) * 2e-3;
            for (a, b) in found.iter().zip(&expected) {
                prop_assert!((a - b).abs() <= bound, "{format:?} {a} {b}");
            }
        }
    }

    #[test]
    fn gated_products_equal_plain_arithmetic(width in 1usize..12, rows in 1usize..30, seed in any::<u64>()) {
        let (outputs, cols) = (width * 16, 64);
        let make = |seed| {
            let data = bytes(Format::F32, outputs, cols, seed);
            Packed::pack(&Stored { format: Format::F32, rows: outputs, cols, bytes: &data, interleaved_heads: 0 }, WeightType::Stored)
        };
        let (gate, up) = (make(seed), make(seed ^ 3));
        let (gate_linear, up_linear) = (Linear::new(vec![make(seed)]), Linear::new(vec![make(seed ^ 3)]));
        let x = noise(rows * cols, seed ^ 9);
        for kernels in kernels() {
            let mut threads = Threads::new(2).expect("threads start");
            let mut locals = vec![Local::new(), Local::new()];
            let (mut acts, mut next) = (Acts::default(), Acts::default());
            let view = put(kernels, &mut acts, &gate_linear, &x, rows, cols);
            let to = next.shape(rows, outputs, kernels.tile, gate_linear.form());
            gated(&mut Hands { kernels, threads: &mut threads, locals: &mut locals }, (&gate, &up), view, to);
            let g = product(kernels, &gate_linear, &x, rows, cols, 1);
            let u = product(kernels, &up_linear, &x, rows, cols, 1);
            for row in 0..rows {
                let (tile, place) = to.locate(row);
                let tile = to.tile(tile);
                for n in 0..outputs {
                    // SAFETY: floats of a tile lie as [cols][rows].
                    let found = f64::from(unsafe { *tile.f.add(n * tile.rows + place) });
                    let (a, b) = (f64::from(g[row * outputs + n]), f64::from(u[row * outputs + n]));
                    let expected = a / (1.0 + (-a).exp()) * b;
                    prop_assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()));
                }
            }
        }
    }
}

#[test]
fn formats_have_the_block_sizes_of_ggml() {
    for (name, values, size) in
        [("Q4_0", 32, 18), ("Q4_1", 32, 20), ("Q8_0", 32, 34), ("Q4_K", 256, 144), ("Q6_K", 256, 210)]
    {
        assert_eq!(Format::from_name(name).map(Format::block), Some((values, size)));
    }
    assert_eq!(Format::from_name("IQ2_XS"), None);
    assert_eq!(Format::Q4K.row_bytes(128), None);
}

#[test]
fn a_q4_1_block_means_scale_times_nibble_plus_minimum() {
    let mut block = vec![0u8; 20];
    block[..2].copy_from_slice(&to_f16(0.5).to_le_bytes());
    block[2..4].copy_from_slice(&to_f16(-1.0).to_le_bytes());
    block[4] = 0x3f;
    let mut out = [0.0; 32];
    ggml::values(Format::Q4_1, &block, &mut out);
    assert_eq!((out[0], out[16], out[1]), (6.5, 0.5, -1.0));
}
