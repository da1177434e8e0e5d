"""Plain torch versions of every kernel, written to be read; tests and CPUs without a compiler use them."""
