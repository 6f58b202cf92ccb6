"""The price of privacy events: accountants, the bounds they rest on, filters, amplification."""
