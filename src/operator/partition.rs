//! Which partition a record goes to: as Kafka's Java clients choose it, so that what they write by the same key lies
//! beside what semel writes.

/// The partition of a key among `partitions`; a record without a key keeps its input's partition (modulo `partitions`).
/// An empty key is a key.
pub fn partition(key: Option<&[u8]>, input: i32, partitions: i32) -> i32 {
    let partitions = partitions.max(1);
    match key {
        Some(key) => (murmur2(key) & 0x7fff_ffff) % partitions,
        None => input.rem_euclid(partitions),
    }
}

/// MurmurHash2 with Kafka's seed, as `org.apache.kafka.common.utils.Utils.murmur2`.
pub fn murmur2(data: &[u8]) -> i32 {
    const M: u32 = 0x5bd1_e995;
    const SEED: u32 = 0x9747_b28c;
    let mut hash = SEED ^ data.len() as u32;
    let mut words = data.chunks_exact(4);
    for word in &mut words {
        let mut k = u32::from_le_bytes(word.try_into().expect("four bytes")).wrapping_mul(M);
        k ^= k >> 24;
        hash = hash.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    let tail = words.remainder();
    if !tail.is_empty() {
        for (i, byte) in tail.iter().enumerate() {
            hash ^= u32::from(*byte) << (8 * i);
        }
        hash = hash.wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^= hash >> 15;
    hash as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors of Kafka's own UtilsTest.
    #[test]
    fn hashes_are_those_of_the_java_client() {
        let vectors: [(&[u8], i32); 6] = [
            (b"21", -973_932_308),
            (b"foobar", -790_332_482),
            (b"a-little-bit-long-string", -985_981_536),
            (b"a-little-bit-longer-string", -1_486_304_829),
            (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            (b"abc", 479_470_107),
        ];
        for (key, hash) in vectors {
            assert_eq!(murmur2(key), hash, "{}", String::from_utf8_lossy(key));
        }
    }

    #[test]
    fn keys_spread_and_a_missing_one_stays_where_it_was() {
        assert_eq!(partition(Some(b"21"), 0, 12), (-973_932_308 & 0x7fff_ffff) % 12);
        assert_eq!(partition(Some(b""), 7, 12), (murmur2(b"") & 0x7fff_ffff) % 12);
        assert_eq!(partition(None, 7, 12), 7);
        assert_eq!(partition(None, 7, 3), 1);
        assert_eq!(partition(Some(b"x"), 7, 1), 0);
    }
}
