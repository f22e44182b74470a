//! From stored tensors to a `Model`: which tensor goes where, with every shape checked.

use std::collections::HashMap;
use std::sync::Arc;

use super::forward::{Layer, Model, Work};
use super::host::HostPages;
use super::kv::Cache;
use super::linear::Linear;
use super::profile::Profile;
use super::spec::Spec;
use super::weight::{Packed, Stored, WeightType};
use crate::kernels::attention::WIDEST;
use crate::kernels::{Isa, Kernels, Region, Threads};

/// How a model is to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) isa: Isa,
    pub(crate) threads: usize,
    pub(crate) weights: WeightType,
    /// Keys and values as 16-bit integers with scales instead of f32.
    pub(crate) coded_cache: bool,
    pub(crate) pages: usize,
    pub(crate) page_size: usize,
}

/// Collects tensors by canonical name, packing each as it comes.
pub(crate) struct Builder {
    spec: Spec,
    options: Options,
    matrices: HashMap<String, Packed>,
    vectors: HashMap<String, Vec<f32>>,
}

type Result<T> = std::result::Result<T, String>;

impl Builder {
    /// Refuses shapes that the kernels cannot run.
    pub(crate) fn new(spec: Spec, options: Options) -> Result<Self> {
        if spec.head_dim > WIDEST || !spec.head_dim.is_multiple_of(2) {
            return Err(format!(
                "head_dim {} is not supported: it must be even and at most {WIDEST}",
                spec.head_dim
            ));
        }
        if spec.kv_heads == 0 || !spec.heads.is_multiple_of(spec.kv_heads) || spec.layers == 0 {
            return Err(format!(
                "heads {} must be a multiple of kv_heads {}, and layers at least 1",
                spec.heads, spec.kv_heads
            ));
        }
        if options.page_size == 0 || options.pages == 0 {
            return Err(format!(
                "num_pages {} and page_size {} must be positive",
                options.pages, options.page_size
            ));
        }
        if !options.isa.is_here() {
            return Err(format!(
                "isa {:?} is not available on this cpu; leave it out to take the best one",
                options.isa.name()
            ));
        }
        Ok(Self { spec, options, matrices: HashMap::new(), vectors: HashMap::new() })
    }

    /// Take one tensor: a matrix (`rows` of `cols`), or a vector as `rows` of 1.
    pub(crate) fn add(&mut self, name: &str, stored: &Stored<'_>) -> Result<()> {
        let width = stored.format.row_bytes(stored.cols);
        let expected = width.and_then(|width| width.checked_mul(stored.rows));
        if expected != Some(stored.bytes.len()) || stored.rows == 0 {
            return Err(format!(
                "tensor {name} of {} x {} values as {:?} cannot have {} bytes",
                stored.rows,
                stored.cols,
                stored.format,
                stored.bytes.len()
            ));
        }
        let heads = stored.interleaved_heads;
        if heads > 0 && !stored.rows.is_multiple_of(2 * heads) {
            return Err(format!(
                "tensor {name} of {} rows cannot be {heads} heads of an even width",
                stored.rows
            ));
        }
        if stored.cols > 1 {
            self.matrices.insert(name.to_owned(), Packed::pack(stored, self.options.weights));
            return Ok(());
        }
        let mut vector = vec![0.0; stored.rows];
        for (row, value) in vector.iter_mut().enumerate() {
            stored.values(row, std::slice::from_mut(value));
        }
        self.vectors.insert(name.to_owned(), vector);
        Ok(())
    }

    /// Put all matrices into one region, in the order in which a step reads them.
    fn gather(layers: &mut [Layer], rest: &mut [&mut Linear]) -> Result<()> {
        let mut all: Vec<&mut Packed> = Vec::new();
        for layer in layers {
            all.extend(layer.qkv.parts_mut());
            all.extend(layer.output.parts_mut());
            all.extend([&mut layer.gate, &mut layer.up]);
            all.extend(layer.down.parts_mut());
        }
        all.extend(rest.iter_mut().flat_map(|linear| linear.parts_mut()));
        let bytes = all.iter().map(|packed| packed.room()).sum();
        let full = || format!("no memory for {bytes} bytes of weights");
        let mut region = Region::new(bytes).ok_or_else(full)?;
        let places = all.iter_mut().map(|packed| packed.move_to(&mut region)).collect::<Option<Vec<_>>>();
        let places = places.ok_or_else(full)?;
        let region = Arc::new(region);
        all.into_iter().zip(places).for_each(|(packed, at)| packed.settle(&region, at));
        Ok(())
    }

    /// The finished model. Names what is missing or has a wrong shape.
    pub(crate) fn finish(mut self) -> Result<Model> {
        let spec = self.spec.clone();
        let options = self.options;
        let embedding = self.matrix("model.embed_tokens.weight", spec.vocab, spec.hidden)?;
        let mut head = match self.matrices.contains_key("lm_head.weight") {
            true => Some(Linear::new(vec![self.matrix("lm_head.weight", spec.vocab, spec.hidden)?])),
            false => None,
        };
        let norm = self.vector("model.norm.weight", spec.hidden)?;
        let mut layers = (0..spec.layers).map(|index| self.layer(index)).collect::<Result<Vec<_>>>()?;
        let mut embedding = Linear::new(vec![embedding]);
        Self::gather(&mut layers, &mut head.iter_mut().chain([&mut embedding]).collect::<Vec<_>>())?;
        let kernels = Kernels::of(options.isa)
            .ok_or_else(|| format!("isa {:?} is not available", options.isa.name()))?;
        let threads =
            Threads::new(options.threads).map_err(|error| format!("kernel threads cannot start: {error}"))?;
        let cache =
            Cache::new(&spec, options.pages, options.page_size, options.coded_cache).ok_or_else(|| {
                format!(
                    "no memory for {} pages of {} tokens; lower max-total-tokens",
                    options.pages, options.page_size
                )
            })?;
        Ok(Model {
            frequencies: spec.frequencies(),
            spec,
            kernels,
            threads,
            cache,
            host: HostPages::default(),
            embedding,
            layers,
            norm,
            head,
            work: Work::default(),
            profile: Profile::default(),
        })
    }

    fn layer(&mut self, index: usize) -> Result<Layer> {
        let spec = self.spec.clone();
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let (query, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let qkv = Linear::new(vec![
            self.matrix(&name("self_attn.q_proj.weight"), query, spec.hidden)?,
            self.matrix(&name("self_attn.k_proj.weight"), kv, spec.hidden)?,
            self.matrix(&name("self_attn.v_proj.weight"), kv, spec.hidden)?,
        ]);
        let mut qkv_bias = Vec::new();
        for (part, (label, rows)) in [("q", query), ("k", kv), ("v", kv)].into_iter().enumerate() {
            let bias = name(&format!("self_attn.{label}_proj.bias"));
            if self.vectors.contains_key(&bias) {
                let values = self.vector(&bias, rows)?;
                qkv_bias.resize(qkv.width(), 0.0);
                qkv_bias[qkv.offset(part)..][..rows].copy_from_slice(&values);
            }
        }
        let head_norms = match spec.qk_norm {
            true => (
                self.vector(&name("self_attn.q_norm.weight"), spec.head_dim)?,
                self.vector(&name("self_attn.k_norm.weight"), spec.head_dim)?,
            ),
            false => (Vec::new(), Vec::new()),
        };
        let output_bias = name("self_attn.o_proj.bias");
        Ok(Layer {
            attention_norm: self.vector(&name("input_layernorm.weight"), spec.hidden)?,
            qkv,
            qkv_bias,
            head_norms,
            output: Linear::new(vec![self.matrix(&name("self_attn.o_proj.weight"), spec.hidden, query)?]),
            output_bias: if self.vectors.contains_key(&output_bias) {
                self.vector(&output_bias, spec.hidden)?
            } else {
                Vec::new()
            },
            mlp_norm: self.vector(&name("post_attention_layernorm.weight"), spec.hidden)?,
            gate: self.matrix(&name("mlp.gate_proj.weight"), spec.intermediate, spec.hidden)?,
            up: self.matrix(&name("mlp.up_proj.weight"), spec.intermediate, spec.hidden)?,
            down: Linear::new(vec![self.matrix(
                &name("mlp.down_proj.weight"),
                spec.hidden,
                spec.intermediate,
            )?]),
        })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Packed> {
        let packed = self.matrices.remove(name).ok_or_else(|| format!("tensor {name} is missing"))?;
        if (packed.rows, packed.cols) != (rows, cols) {
            return Err(format!(
                "tensor {name} is {} x {}, the model needs {rows} x {cols}",
                packed.rows, packed.cols
            ));
        }
        Ok(packed)
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>> {
        let vector = self.vectors.remove(name).ok_or_else(|| format!("tensor {name} is missing"))?;
        if vector.len() != length {
            return Err(format!("tensor {name} has {} values, the model needs {length}", vector.len()));
        }
        Ok(vector)
    }
}
