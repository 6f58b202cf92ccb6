"""What releases cost: privacy-loss distributions, Rényi divergences, composition, filters, amplification."""
