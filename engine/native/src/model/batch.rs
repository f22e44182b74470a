//! One step's rows, checked before anything is computed.

use super::spec::Spec;

/// Borrowed rows of one step; see `ForwardBatch` of the Python package.
pub(crate) struct Batch<'a> {
    pub(crate) tokens: &'a [i32],
    pub(crate) positions: &'a [i32],
    pub(crate) slots: &'a [i64],
    pub(crate) query_lens: &'a [i32],
    pub(crate) context_lens: &'a [i32],
    pub(crate) page_tables: &'a [Vec<u32>],
    pub(crate) logit_rows: &'a [i64],
}

impl Batch<'_> {
    /// Refuse what would reach outside a table, a pool or a page list. The message names field and value.
    pub(crate) fn check(&self, spec: &Spec, pages: usize, page_size: usize) -> Result<(), String> {
        let count = self.tokens.len();
        if self.positions.len() != count || self.slots.len() != count {
            return Err(format!(
                "token_ids, positions and slots must have one length, not {count}, {} and {}",
                self.positions.len(),
                self.slots.len()
            ));
        }
        let sequences = self.query_lens.len();
        if self.context_lens.len() != sequences || self.page_tables.len() != sequences {
            return Err(format!(
                "query_lens, context_lens and page_tables must have one length, not {sequences}, {} and {}",
                self.context_lens.len(),
                self.page_tables.len()
            ));
        }
        if let Some(id) = self.tokens.iter().find(|&&id| id < 0 || id as usize >= spec.vocab) {
            return Err(format!("token_ids holds {id}, which is outside the vocabulary of {}", spec.vocab));
        }
        let slots = (pages * page_size) as i64;
        if let Some(slot) = self.slots.iter().find(|&&slot| slot < 0 || slot >= slots) {
            return Err(format!("slots holds {slot}, which is outside the pool of {slots}"));
        }
        if let Some(row) = self.logit_rows.iter().find(|&&row| row < 0 || row as usize >= count) {
            return Err(format!("logit_rows holds {row}, which is outside the {count} rows"));
        }
        self.check_sequences(pages, page_size)
    }

    fn check_sequences(&self, pages: usize, page_size: usize) -> Result<(), String> {
        let mut at = 0;
        for (i, table) in self.page_tables.iter().enumerate() {
            let (query, context) = (self.query_lens[i], self.context_lens[i]);
            if query < 1 || context < query {
                return Err(format!("sequence {i} has {query} new tokens in a context of {context}"));
            }
            let end = at + query as usize;
            let positions = self.positions.get(at..end).ok_or_else(|| {
                format!("query_lens add up to more than the {} token_ids", self.tokens.len())
            })?;
            if let Some(position) = positions.iter().find(|&&position| position < 0 || position >= context) {
                return Err(format!("sequence {i} has position {position} outside its context of {context}"));
            }
            if table.len() * page_size < context as usize {
                return Err(format!("sequence {i} has {} pages for a context of {context}", table.len()));
            }
            if let Some(page) = table.iter().find(|&&page| page as usize >= pages) {
                return Err(format!("sequence {i} names page {page} of a pool of {pages}"));
            }
            at = end;
        }
        if at != self.tokens.len() {
            return Err(format!("query_lens add up to {at}, not to the {} token_ids", self.tokens.len()));
        }
        Ok(())
    }
}
