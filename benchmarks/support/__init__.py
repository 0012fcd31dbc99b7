"""What the benchmarks share. Everything runs on this machine, over loopback, bounded in count and time."""
