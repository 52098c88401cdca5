//! Event identity.
