#include "flags.h"

#include <muster/base/error.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

Flags parse_flags(int argc, char** argv) {
  Flags flags;
  std::string out = flags.out, data = flags.data, json, snapshot;
  CLI::App app("Trains a convolutional network on Fashion-MNIST, on as many processes as `muster run -n N` starts.",
               "fashion_mnist");
  app.add_option("--data", data, "folder with the four idx files")->type_name("DIR")->capture_default_str();
  app.add_option("--epochs", flags.epochs, "times to go through the images")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--batch", flags.batch, "images per step, over all ranks together")
      ->check(CLI::Range(1, 60000))
      ->capture_default_str();
  app.add_option("--lr", flags.lr, "highest learning rate")->check(CLI::Range(1e-12, 1e6))->capture_default_str();
  app.add_option("--seed", flags.seed, "seed of the weights and of the order of the images")->capture_default_str();
  const std::map<std::string, NetKind> nets{{"small", NetKind::kSmall}, {"demo", NetKind::kDemo}};
  std::string net = "demo";
  app.add_option("--net", net, "network: demo, or small, which the benchmarks use")
      ->type_name("NAME")
      ->check(CLI::IsMember({"demo", "small"}))
      ->capture_default_str();
  app.add_option("--limit", flags.limit, "use only the first N images of each part; 0 for all")
      ->type_name("N")
      ->check(CLI::Range(0, 60000))
      ->capture_default_str();
  app.add_option("--out", out, "picture of the curves")->type_name("FILE.svg")->capture_default_str();
  app.add_option("--json", json, "write the numbers to this file, too")->type_name("FILE");
  app.add_option("--snapshot", snapshot, "save into this folder, and resume from its snapshot")->type_name("DIR");
  app.add_option("--every", flags.every, "steps between snapshots; 0: only when asked to stop (SIGTERM)")
      ->check(CLI::Range(0, 1000000000))
      ->capture_default_str();
  app.add_flag("--elastic", flags.elastic,
               "when a rank is lost, the others go on, and muster run --max-restarts replaces it");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    std::exit(0);
  } catch (const CLI::ParseError& error) {
    throw muster::InvalidArgument(error.what(), "fashion_mnist --help lists the flags");
  }
  flags.data = data;
  flags.out = out;
  flags.json = json;
  flags.snapshot = snapshot;
  flags.net = nets.at(net);
  return flags;
}
