//! The one list of what workers are there for; says nothing of how they are told.

/// What a worker is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Answers requests alone.
    Regular,
    /// Computes prompts for others.
    Prefill,
    /// Decodes from prompts that others computed; engines of ours and vLLM also serve alone.
    Decode,
    /// Either half, or alone.
    Both,
}

impl Role {
    /// As `worker_type` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Regular => "regular",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }

    /// Of a `worker_type`; whatever is no half is regular.
    pub fn of(name: &str) -> Self {
        [Self::Prefill, Self::Decode, Self::Both]
            .into_iter()
            .find(|one| one.name() == name)
            .unwrap_or(Self::Regular)
    }

    /// Of a worker that is there for `self` and for `other`.
    pub fn with(self, other: Self) -> Self {
        match (self, other) {
            (Self::Regular, role) | (role, Self::Regular) => role,
            (one, two) if one == two => one,
            _ => Self::Both,
        }
    }
}
