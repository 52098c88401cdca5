//! How state is written: numbers of variable length, and bytes behind their length.

/// Writes seven bits a byte, the lowest first.
pub(super) fn put_number(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

pub(super) fn put_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    put_number(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// What is still to be read. Every reader answers `None` for bytes that nobody wrote so.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coded<'a>(pub(super) &'a [u8]);

impl<'a> Coded<'a> {
    pub(super) fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<&'a [u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(array)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_was_written_is_read(number in any::<u64>(), bytes in any::<Vec<u8>>()) {
            let mut out = Vec::new();
            put_number(number, &mut out);
            put_bytes(&bytes, &mut out);
            let mut coded = Coded(&out);
            prop_assert_eq!(coded.number(), Some(number));
            prop_assert_eq!(coded.bytes(), Some(&bytes[..]));
            prop_assert!(coded.0.is_empty());
            for end in 0..out.len() {
                let mut coded = Coded(&out[..end]);
                prop_assert_eq!(coded.number().and_then(|_| coded.bytes()), None);
            }
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in any::<Vec<u8>>()) {
            let mut coded = Coded(&bytes);
            while coded.bytes().is_some() {}
        }
    }
}
