"""Counters, gauges and histograms of workers and memory devices: reading, serving and reporting them."""
