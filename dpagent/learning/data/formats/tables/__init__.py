"""Tables: CSV files, a row a record or windows over a time series."""
