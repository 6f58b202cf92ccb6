"""Integer noise: exact samplers in constant time, from the operating system's entropy."""
