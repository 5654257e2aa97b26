"""Worker processes of benchmarks and experiments: starts them, sends commands, collects answers, ends them."""
