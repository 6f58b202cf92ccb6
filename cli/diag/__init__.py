"""`dpagent diag`: one file for whoever helps the owner of a board, without secrets or data."""
