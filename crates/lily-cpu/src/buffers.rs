//! Memory for activations, kept from step to step so that a step of a size seen before allocates nothing.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

/// Buffers that are not in use. Taken and returned by the thread that runs the step, never inside a loop.
#[derive(Default)]
pub struct Buffers {
    floats: Mutex<Vec<Vec<f32>>>,
    bytes: Mutex<Vec<Vec<i8>>>,
}

/// A slice of its own, returned to its [`Buffers`] when dropped.
pub struct Buffer<'a, T> {
    values: Vec<T>,
    len: usize,
    home: &'a Mutex<Vec<Vec<T>>>,
}

impl Buffers {
    /// `len` values, whatever they are: all must be written before they are read.
    pub fn floats(&self, len: usize) -> Buffer<'_, f32> {
        let mut buffer = take(&self.floats, len);
        if cfg!(debug_assertions) {
            buffer.fill(f32::NAN);
        }
        buffer
    }

    /// `len` zeros.
    pub fn zeros(&self, len: usize) -> Buffer<'_, f32> {
        let mut buffer = take(&self.floats, len);
        buffer.fill(0.0);
        buffer
    }

    /// `len` bytes, whatever they are: all must be written before they are read.
    pub fn bytes(&self, len: usize) -> Buffer<'_, i8> {
        take(&self.bytes, len)
    }
}

/// The smallest free one that is large enough, or else the largest, grown.
fn take<T: Copy + Default>(home: &Mutex<Vec<Vec<T>>>, len: usize) -> Buffer<'_, T> {
    let mut free = home.lock().unwrap_or_else(PoisonError::into_inner);
    let fits = |i: &usize| free[*i].len() >= len;
    let best = (0..free.len()).filter(fits).min_by_key(|&i| free[i].len());
    let best = best.or_else(|| (0..free.len()).max_by_key(|&i| free[i].len()));
    let mut values = best.map(|i| free.swap_remove(i)).unwrap_or_default();
    if values.len() < len {
        values.resize(len, T::default());
    }
    Buffer { values, len, home }
}

impl<T> Drop for Buffer<'_, T> {
    fn drop(&mut self) {
        let values = std::mem::take(&mut self.values);
        self.home.lock().unwrap_or_else(PoisonError::into_inner).push(values);
    }
}

impl<T> Deref for Buffer<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.values[..self.len]
    }
}

impl<T> DerefMut for Buffer<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again() {
        let buffers = Buffers::default();
        let first = buffers.floats(100).as_ptr();
        {
            let (a, b) = (buffers.floats(50), buffers.zeros(10));
            assert_eq!((a.as_ptr(), a.len(), &b[..]), (first, 50, &[0.0; 10][..]));
        }
        assert_eq!(buffers.floats(90).as_ptr(), first);
    }
}
