// What a screen reader and a keyboard need of a page; returns one line for each fault.
(() => {
  const faults = [];
  const shown = (node) => node.checkVisibility({ visibilityProperty: true });
  const name = (node) =>
    (node.getAttribute("aria-label") ??
      (node.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join(" ")
    ).trim() || [...(node.labels ?? [])].map((label) => label.textContent).join(" ").trim() || node.textContent.trim();
  const of = (node) => `${node.tagName.toLowerCase()}#${node.id}.${node.className}`;
  const controls = "button, a[href], input, select, textarea, meter, [role=img], [role=region], nav, dialog[open], section";
  for (const node of document.querySelectorAll(controls)) {
    if (shown(node) && !name(node)) faults.push(`no name: ${of(node)}`);
  }
  for (const tag of ["header", "main", "footer", "h1"]) {
    if (document.querySelectorAll(tag).length !== 1) faults.push(`not one ${tag}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  const twice = ids.filter((id, index) => ids.indexOf(id) !== index);
  if (twice.length) faults.push(`ids twice: ${twice}`);
  let level = 1;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    if (!shown(heading)) continue;
    const now = Number(heading.tagName[1]);
    if (now > level + 1) faults.push(`heading skips a level: ${heading.textContent}`);
    level = now;
  }
  for (const node of document.querySelectorAll("table")) {
    if (!node.querySelector("thead th[scope=col]")) faults.push(`no headings: ${of(node)}`);
  }
  if (!document.documentElement.lang) faults.push("no language");
  if (!document.querySelector("[aria-live=polite]")) faults.push("no live region");
  for (const node of document.querySelectorAll("[tabindex]")) {
    if (node.tabIndex > 0) faults.push(`changes the order of focus: ${of(node)}`);
  }
  for (const node of document.querySelectorAll("button, .choice, input")) {
    const { height, width } = node.getBoundingClientRect();
    if (shown(node) && (height < 18 || width < 18)) faults.push(`too small to hit: ${of(node)} ${width}x${height}`);
  }
  faults.push(...contrasts(shown, of));
  return faults;

  // WCAG 2.2, 1.4.3: 4.5 to 1 for text.
  function contrasts(shown, of) {
    const found = [];
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const over = (colours) => {
      canvas.clearRect(0, 0, 1, 1);
      for (const colour of colours) {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
      }
      return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (rgb) => {
      const [r, g, b] = rgb.map((part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || !shown(node) || node.closest(".unseen, .skip, noscript, [aria-disabled=true]")) continue;
      const grounds = [];
      for (let each = node; each; each = each.parentElement) grounds.unshift(getComputedStyle(each).backgroundColor);
      const ground = over(grounds);
      const [one, two] = [light(over([`rgb(${ground})`, getComputedStyle(node).color])), light(ground)].sort((a, b) => b - a);
      const ratio = (one + 0.05) / (two + 0.05);
      if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(2)}: ${of(node)} ${walker.currentNode.data.slice(0, 30)}`);
    }
    return found;
  }
})()
