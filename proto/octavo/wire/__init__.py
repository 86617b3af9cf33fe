"""What the processes say to each other over ZMQ: typed messages, their codec, the sockets they travel on."""
