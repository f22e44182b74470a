//! Python integers to ids and pages, and our errors to Python's.

use std::ops::Deref;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PySequence, PyString, PyTuple};

use crate::kernels::words_of;

/// Token ids or page numbers: a sequence of integers, or a buffer of them (`array`, numpy).
pub(crate) struct Numbers(pub(crate) Vec<u32>);

/// The same for calls that only read: a buffer of unsigned 32-bit numbers is read where it lies.
pub(crate) enum Ids {
    InPlace(PyBuffer<u32>),
    Copied(Vec<u32>),
}

impl Deref for Ids {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            // The second case is ruled out in `extract`.
            Self::InPlace(buffer) => words_of(buffer).unwrap_or_default(),
            Self::Copied(numbers) => numbers,
        }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Ids {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let plain = object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>();
        if !plain
            && let Ok(buffer) = PyBuffer::<u32>::get(&object)
            && words_of(&buffer).is_some()
        {
            return Ok(Self::InPlace(buffer));
        }
        Numbers::extract(object).map(|numbers| Self::Copied(numbers.0))
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Numbers {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = object.cast::<PyList>() {
            return collect(list.len(), list.iter());
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return collect(tuple.len(), tuple.iter());
        }
        if let Some(numbers) = from_buffer(&object)? {
            return Ok(Self(numbers));
        }
        let is_text = object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>();
        if !is_text && let Ok(sequence) = object.cast::<PySequence>() {
            let items = sequence.to_list()?;
            return collect(items.len(), items.iter());
        }
        let name = object.get_type().name()?;
        Err(PyTypeError::new_err(format!("expected a sequence or array of integers, not {name}")))
    }
}

fn collect<'py>(len: usize, items: impl Iterator<Item = Bound<'py, PyAny>>) -> PyResult<Numbers> {
    let mut numbers = Vec::with_capacity(len);
    for (index, item) in items.enumerate() {
        match item.extract::<u32>() {
            Ok(number) => numbers.push(number),
            Err(error) if error.is_instance_of::<PyTypeError>(item.py()) => {
                let name = item.get_type().name()?;
                return Err(PyTypeError::new_err(format!("entry {index} must be an integer, not {name}")));
            }
            Err(_) => return Err(out_of_range(index, &item)),
        }
    }
    Ok(Numbers(numbers))
}

fn out_of_range(index: usize, value: &dyn std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("entry {index} is {value}: ids are from 0 to 4294967295"))
}

fn from_buffer(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u32>>> {
    let py = object.py();
    if let Ok(buffer) = PyBuffer::<u32>::get(object) {
        return buffer.to_vec(py).map(Some);
    }
    if let Ok(buffer) = PyBuffer::<i32>::get(object) {
        return narrow(buffer.to_vec(py)?).map(Some);
    }
    if let Ok(buffer) = PyBuffer::<i64>::get(object) {
        return narrow(buffer.to_vec(py)?).map(Some);
    }
    Ok(None)
}

fn narrow<T: TryInto<u32> + Copy + std::fmt::Display>(values: Vec<T>) -> PyResult<Vec<u32>> {
    values
        .iter()
        .enumerate()
        .map(|(index, &value)| value.try_into().map_err(|_| out_of_range(index, &value)))
        .collect()
}

/// Our refusals are all about values.
pub(crate) fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}
