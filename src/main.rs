#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

unsafe extern "C" {
    fn mi_option_set_default(option: std::ffi::c_int, value: std::ffi::c_long);
}

/// `mi_option_purge_delay` of `mimalloc.h`, in versions 2 and 3.
const PURGE_DELAY: std::ffi::c_int = 15;

fn main() {
    // Memory that is free for so many milliseconds goes back to the system; the default of a second keeps a quarter more
    // resident. `MIMALLOC_PURGE_DELAY` still wins.
    // SAFETY: the call sets a number and may come at any time.
    unsafe { mi_option_set_default(PURGE_DELAY, 100) };
    std::process::exit(semel::cli::main() as i32);
}
