"""What tests and benchmarks share. The library never imports it."""
