//! CPU milliseconds of one product y = x W^T by other people's code: gemm's f32 and candle's quantised weights.
//!
//! usage: branchline-bench-kernels IN,OUT... ROWS,... : prints one JSON object, name -> "INxOUT rows" -> ms. One thread.

use std::collections::BTreeMap;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Module, Result, Tensor};
use cpu_time::ProcessTime;

/// So long is measured at least, after one call that warms up.
const LEAST_MS: f64 = 30.0;

type Table = BTreeMap<String, BTreeMap<String, f64>>;

fn main() -> Result<()> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let Some((rows, shapes)) = given.split_last() else {
        return Err(candle_core::Error::Msg("usage: branchline-bench-kernels IN,OUT... ROWS,...".into()));
    };
    let mut table = Table::new();
    for shape in shapes {
        let (size, outputs) = pair(shape)?;
        for rows in rows.split(',') {
            let rows = number(rows)?;
            let case = format!("{size}x{outputs} {rows}");
            let mut put = |name: &str, ms: f64| {
                table.entry(name.to_owned()).or_default().insert(case.clone(), ms);
            };
            put("gemm f32", dense(size, outputs, rows));
            for (name, kind) in [("candle Q4_0", GgmlDType::Q4_0), ("candle Q8_0", GgmlDType::Q8_0)] {
                put(name, quantised(kind, size, outputs, rows)?);
            }
        }
    }
    println!("{}", serde_json::json!(table));
    Ok(())
}

fn number(text: &str) -> Result<usize> {
    text.parse().map_err(|_| candle_core::Error::Msg(format!("{text:?} is not a number")))
}

fn pair(text: &str) -> Result<(usize, usize)> {
    let (size, outputs) =
        text.split_once(',').ok_or_else(|| candle_core::Error::Msg(format!("{text:?} is not IN,OUT")))?;
    Ok((number(size)?, number(outputs)?))
}

/// Numbers in [-1, 1) that repeat late.
fn values(count: usize) -> Vec<f32> {
    let mut state = 1_u32;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// CPU milliseconds of one call.
fn time(mut call: impl FnMut()) -> f64 {
    call();
    let (started, mut calls) = (ProcessTime::now(), 0.0);
    loop {
        call();
        calls += 1.0;
        let spent = started.elapsed().as_secs_f64() * 1e3;
        if spent >= LEAST_MS {
            return spent / calls;
        }
    }
}

fn dense(size: usize, outputs: usize, rows: usize) -> f64 {
    let (weights, inputs) = (values(outputs * size), values(rows * size));
    let mut found = vec![0.0_f32; rows * outputs];
    let (size_stride, output_stride) = (size as isize, outputs as isize);
    time(|| {
        // SAFETY: the pointers, sizes and strides are those of the three row-major matrices above.
        unsafe {
            gemm::gemm(
                rows,
                outputs,
                size,
                found.as_mut_ptr(),
                1,
                output_stride,
                false,
                inputs.as_ptr(),
                1,
                size_stride,
                weights.as_ptr(),
                size_stride,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
        std::hint::black_box(&found);
    })
}

fn quantised(kind: GgmlDType, size: usize, outputs: usize, rows: usize) -> Result<f64> {
    let weights = Tensor::from_vec(values(outputs * size), (outputs, size), &Device::Cpu)?;
    let product = QMatMul::from_qtensor(QTensor::quantize(&weights, kind)?)?;
    let inputs = Tensor::from_vec(values(rows * size), (rows, size), &Device::Cpu)?;
    product.forward(&inputs)?;
    Ok(time(|| {
        std::hint::black_box(product.forward(&inputs).is_ok());
    }))
}
