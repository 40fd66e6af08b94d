"""Views of what `experiment` and `bench` have written, in the watch page: entry points of hacpo_mega.watch.studies."""
