"""A whole fleet on one machine: broker, coordinator and agents as processes of their own."""
