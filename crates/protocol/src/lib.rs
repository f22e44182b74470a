//! OpenAI and SGLang-native wire types, error bodies and SSE framing. serde only.
