"""Models: layers, their composition, their description on the wire and in files, the built-in ones."""
