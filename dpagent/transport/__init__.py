"""The supervised MQTT session: the only user of the MQTT library."""

from dpagent.put_off import put_off

# The library asks it for proxies where PySocks is installed. With HTTP and e-mail it takes 2 MiB of a board.
put_off("urllib.request")
