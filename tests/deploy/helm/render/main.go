// Renders a chart's templates as Helm does, for tests where no helm is: Go's text/template with sprig, and of the
// functions that Helm adds those that our chart uses. It does not install, sort or validate anything.
//
//	GO111MODULE=off GOPATH=/usr/share/gocode go run main.go FOLDER < '{"Values": …, "Release": …, …}'
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"github.com/ghodss/yaml"
)

func main() {
	if err := render(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// render writes every template of the chart in this folder that is no partial, each below its name.
func render(folder string) error {
	var top map[string]interface{}
	if err := json.NewDecoder(os.Stdin).Decode(&top); err != nil {
		return err
	}
	base := filepath.Join(filepath.Base(folder), "templates")
	paths, err := filepath.Glob(filepath.Join(folder, "templates", "*"))
	if err != nil {
		return err
	}
	all := template.New("chart").Option("missingkey=zero")
	all.Funcs(functions(all))
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if _, err := all.New(filepath.Join(base, filepath.Base(path))).Parse(string(text)); err != nil {
			return err
		}
	}
	sort.Strings(paths)
	for _, path := range paths {
		name := filepath.Join(base, filepath.Base(path))
		if strings.HasPrefix(filepath.Base(path), "_") {
			continue
		}
		top["Template"] = map[string]interface{}{"Name": name, "BasePath": base}
		var out bytes.Buffer
		if err := all.ExecuteTemplate(&out, name, top); err != nil {
			return err
		}
		fmt.Printf("---\n# Source: %s\n%s\n", name, strings.ReplaceAll(out.String(), "<no value>", ""))
	}
	return nil
}

func functions(all *template.Template) template.FuncMap {
	made := sprig.TxtFuncMap()
	delete(made, "env")
	delete(made, "expandenv")
	made["include"] = func(name string, data interface{}) (string, error) {
		var out strings.Builder
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	made["required"] = func(told string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, errors.New(told)
		}
		return value, nil
	}
	made["toYaml"] = func(value interface{}) (string, error) {
		text, err := yaml.Marshal(value)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	made["fromYaml"] = func(text string) (map[string]interface{}, error) {
		found := map[string]interface{}{}
		return found, yaml.Unmarshal([]byte(text), &found)
	}
	made["fromYamlArray"] = func(text string) ([]interface{}, error) {
		found := []interface{}{}
		return found, yaml.Unmarshal([]byte(text), &found)
	}
	return made
}
