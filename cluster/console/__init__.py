"""The operator's console: one page on a cluster, live. It reads and changes nothing.

traffic, pools, verdict, view    pure: what was seen → the one value that the page shows (a scene)
asking, watcher                  look at Redis, workers and routers once a second, for all who watch
guard, serve                     who may look; the page and its stream
page/                            HTML, CSS and JavaScript modules, served as they are
"""
